"""What is compiled before vLLM starts is what its forwards launch later."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from policy_models import make_policy
from qarl_kernels.ahead import _kind
from qarl_kernels.attention import PAGE
from qarl_kernels.distribution import Distribution, distribution
from qarl_kernels.launch import recording
from qarl_kernels.logprob import Truncation
from torch import Tensor

from qarl.policy.attention import Attention, Caches
from qarl.policy.fused_attention import DecodeAttention, PagedAttention
from qarl.policy.policy import Policy
from qarl.rollout.vllm.exact.rehearsal import perform

CPU = torch.device("cpu")
CONTEXT, MOST, SEQUENCES = 256, 96, 24


class Forward:
    """As much of `qarl.rollout.vllm.exact.model.Forward` as vLLM's start runs, of a policy of Triton kernels."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.logit_rows: list[int] = []

    def pages(self, count: int = 1) -> Caches:
        config = self.policy.model.config
        head_dim, dtype = config.head_dim, self.policy.sampler.cache_dtype
        made = [torch.zeros(count, config.num_key_value_heads, PAGE, 2 * head_dim, dtype=dtype)]
        made *= config.num_hidden_layers
        return [(cache[..., :head_dim], cache[..., head_dim:]) for cache in made]

    def run(self, ids: Tensor, attention: Attention) -> Tensor:
        with self.policy.sampler.running():
            return self.policy.sampler.hidden_states(ids, attention)

    def logits(self, hidden: Tensor) -> Tensor:
        self.logit_rows.append(len(hidden))
        self.found = distribution(hidden.contiguous(), self.policy.sampler.view.head, Truncation())
        return self.found.logits

    def take(self, logits: Tensor) -> Distribution:
        assert self.found.logits is logits
        return self.found


def vllm_config(graphs: bool) -> SimpleNamespace:
    mode = SimpleNamespace(has_full_cudagraphs=lambda: graphs)
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=SEQUENCES, max_num_batched_tokens=MOST),
        model_config=SimpleNamespace(max_model_len=CONTEXT),
        compilation_config=SimpleNamespace(cudagraph_mode=mode, cudagraph_capture_sizes=[1, 8, SEQUENCES]),
    )


@torch.inference_mode()
@pytest.mark.parametrize(("family", "held"), [("qwen3", "auto"), ("mixtral", "auto"), ("qwen3", "fp8")])
def test_later_forwards_launch_nothing_else(family, held, tiny_model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qarl.policy.policy.use_kernels", lambda *_: True)
    with recording():  # a policy whose weights are whatever memory held: kernels depend on no number
        model = tiny_model(family, num_hidden_layers=1, head_dim=32)
        policy = make_policy(model, "bf16", torch.bfloat16, kv_cache_dtype=held)
    assert policy.sampler.view.fused
    assert policy.sampler.cache_dtype == (torch.float8_e4m3fn if held == "fp8" else torch.bfloat16)
    forward = Forward(policy)
    with recording() as ahead:
        perform(forward, vllm_config(True), CPU)
    assert forward.logit_rows == [SEQUENCES, SEQUENCES, 1, 8, SEQUENCES]  # never of a whole prefill
    kinds, pages = {_kind(launch) for launch in ahead}, forward.pages(9)
    table = torch.randint(9, (SEQUENCES, CONTEXT // PAGE), dtype=torch.int32)
    positions = torch.arange(SEQUENCES) * 10
    for rows in (1, 8, SEQUENCES):
        of_rows = positions[:rows], positions[:rows] + PAGE, table[:rows], positions[:rows].int() + 1
        with recording() as later:
            forward.logits(forward.run(torch.full((rows,), 7), DecodeAttention(*of_rows, CONTEXT, pages)))
        assert later and {_kind(launch) for launch in later} <= kinds
    with recording() as later:
        forward.run(torch.arange(MOST), PagedAttention.of_tables(np.array([MOST]), np.array([0]), table[:1], pages))
    assert later and {_kind(launch) for launch in later} <= kinds


@torch.inference_mode()
def test_without_graphs_decodes_of_all_sequences_are_compiled(tiny_model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qarl.policy.policy.use_kernels", lambda *_: True)
    with recording():
        policy = make_policy(tiny_model("qwen3", num_hidden_layers=1), "bf16", torch.bfloat16)
    forward = Forward(policy)
    with recording():
        perform(forward, vllm_config(False), CPU)
    assert forward.logit_rows == [SEQUENCES] * 3
