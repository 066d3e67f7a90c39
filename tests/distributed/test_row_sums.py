"""Gradients are summed over ranks layer by layer during the backward, with unchanged bits; on Triton layers too."""

from collections.abc import Sequence

import pytest
import torch
from policy_models import make_policy, tokens
from qarl_kernels.launch import INTERPRETED
from qarl_kernels.logprob import Truncation
from torch import Tensor

from qarl.distributed.exchange import SingleProcessExchange
from qarl.distributed.rows import plan_of
from qarl.policy.gradients import GradientAccumulator
from qarl.policy.policy import Policy
from qarl.policy.skeleton import drop_values
from qarl.training.row_sums import RowSums, backward_order

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
PROMPTS, RESPONSES = [tokens(3, 1)] * 2, [tokens(4, 3), tokens(1, 4)]
needs_kernels = pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="needs a CUDA device, or TRITON_INTERPRET=1")


class Watched(SingleProcessExchange):
    """Records what is summed, and whether the backward was still running."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy, self.begun = policy, []

    def begin_sums(self, tensors: Sequence[Tensor], cuts):
        assert all(tensor.is_contiguous() for tensor in tensors)
        self.begun.append((len(tensors), torch._C._current_graph_task_id() != -1))
        return super().begin_sums(tensors, cuts)


def made(directory, fused: bool, monkeypatch) -> Policy:
    with monkeypatch.context() as patch:
        if fused:
            patch.setattr("qarl.policy.policy.use_kernels", lambda *_: True)
        kernels = {} if fused else {"kernels": "reference"}
        scheme = ("bf16", None) if fused and not ON_GPU else ("w4a16", 32)
        policy = make_policy(directory, scheme[0], torch.bfloat16, scheme[1], DEVICE, **kernels)
    assert policy.weights.fused == fused
    return policy


def loss_of(policy: Policy) -> Tensor:
    logp, entropy = policy.logprobs(PROMPTS, RESPONSES, Truncation(), 7)
    weights = torch.linspace(-1, 1, len(logp), device=DEVICE)
    return (logp * weights).sum() + 0.1 * entropy.sum()


@pytest.mark.parametrize(
    ("family", "recompute", "fused"),
    [
        ("llama", "elementwise", False),
        ("qwen3", "elementwise", False),
        ("qwen2", "layer", False),
        ("mixtral", "elementwise", False),
        pytest.param("qwen3", "elementwise", True, marks=needs_kernels),
        pytest.param("mixtral", "layer", True, marks=pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")),
    ],
)
def test_rounds_have_the_bits_of_summed_backwards(tiny_model, monkeypatch, family, recompute, fused) -> None:
    slow = fused and not ON_GPU  # the interpreter takes seconds for each forward
    policy = made(tiny_model(family, num_hidden_layers=1 if slow else 2), fused, monkeypatch)
    policy.decoder.recompute = recompute
    named = dict(policy.named_parameters())
    expected: dict[str, Tensor] = {}
    for _ in range(1 if slow else 2):
        accumulator = GradientAccumulator(named.values())
        accumulator.backward(loss_of(policy))
        one = dict(zip(named, accumulator.take(), strict=True))
        expected = {name: expected[name] + gradient for name, gradient in one.items()} if expected else one
    drop_values(named.values(), DEVICE)
    exchange = Watched(policy)
    plan = plan_of({name: master.shape for name, master in named.items()}, policy.scheme_of, 1)
    sums = RowSums(policy, plan, exchange)
    sums.round(loss_of(policy))
    layers = len(policy.decoder.layers)
    names, block_of = {p: name for name, p in named.items()}, {name: b for b in plan.blocks for name in b}
    sizes = [len({block_of[names[p]] for p in group}) for group in backward_order(policy)]
    experts = policy.config.num_local_experts if family == "mixtral" else 0
    assert sum(sizes) == len(named) - layers * max(3 * experts - 2, 0)  # two tensors are what all experts have
    assert [size for size, _ in exchange.begun] == sizes and sum(sizes) == len(plan.blocks)
    assert [during for _, during in exchange.begun] == [True] * (layers + 2)
    sums.round(None)  # in the same order
    assert [size for size, _ in exchange.begun] == 2 * sizes
    if not slow:
        sums.round(loss_of(policy))
    found = sums.take()
    assert found.keys() == named.keys() and all(torch.equal(found[name], expected[name]) for name in named)
    assert sums.take() == {} and all(master.grad is None and master.isnan().all() for master in named.values())
    if not slow:
        loss_of(policy).backward()  # of somebody else: nothing leaves
        assert len(exchange.begun) == 3 * len(sizes) and all(master.grad is not None for master in named.values())
