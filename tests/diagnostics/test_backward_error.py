"""What an FP8 backward does to a gradient: its numbers, and where it is refused."""

import math
from types import SimpleNamespace

import pytest
import torch
from qarl_kernels.launch import INTERPRETED
from tiny_runs import Parts, parts
from torch import Tensor

from qarl.batch.batch import Batch
from qarl.batch.columns import Column
from qarl.diagnostics import backward
from qarl.diagnostics.backward import backward_error, require_fp8_backward, worst_module
from qarl.diagnostics.gradient_passes import Passes
from qarl.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def fused(tiny_model, monkeypatch):
    """fused() -> parts of a run whose only layer is of Triton kernels."""

    def make() -> Parts:
        with monkeypatch.context() as patch:
            patch.setattr("qarl.policy.policy.use_kernels", lambda *_: True)
            run = parts(
                tiny_model("qwen3", num_hidden_layers=1),
                quant={"scheme": "bf16", "group_size": None},
                rollout={"n": 2},
                train={"prompts_per_step": 2, "minibatch_size": 4},
            )
        assert run.policy.weights.fused
        return run

    return make


def drawn(run: Parts) -> Batch:
    """Responses of made-up log-probs: to sample some takes the interpreter longer than all the rest."""
    generator = torch.Generator().manual_seed(1)
    responses = [torch.randint(3, 259, (length,), generator=generator).tolist() for length in (5, 3, 1, 4)]
    return Batch(
        version=run.policy.version,
        device=run.policy.device,
        prompts=[[5, 70, 90]] * 2 + [[6, 70]] * 2,
        responses=responses,
        groups=[0, 0, 1, 1],
        advantages=torch.tensor([1.0, -0.5, 0.0, -1.2]),
        logp_sampler=Column([torch.full((len(r),), -6.0) for r in responses]),
    )


def passes_of(run: Parts, batch: Batch) -> Passes:
    whole = batch.whole()
    return Passes(run.policy, whole.micro_batches(100), whole.tokens, run.sampling.truncation, 64)


def gradients_of(run: Parts, batch: Batch, kind: str) -> dict[str, Tensor]:
    """Of the loss whose gradient it is, with autograd and `.grad` alone."""
    run.policy.decoder.backward = kind
    run.policy.model.zero_grad()
    logp, _ = run.policy.logprobs(batch.prompts, batch.responses, run.sampling.truncation, 64)
    advantages = batch.whole().segments.expand(batch.advantages)
    ratio = (logp.detach() - torch.cat(list(batch.logp_sampler))).exp()
    (-(advantages * ratio * logp).sum() / len(logp)).backward()
    run.policy.decoder.backward = "bf16"
    found = {name: parameter.grad.double().flatten() for name, parameter in run.policy.named_parameters()}
    run.policy.model.zero_grad()
    return found


@pytest.mark.skipif(not INTERPRETED, reason="makes fused layers on the CPU, in Triton's interpreter")
def test_the_two_gradients_are_those_of_the_loss_with_either_backward(fused):
    run = fused()
    batch = drawn(run)
    masters = run.masters()
    found = backward_error(passes_of(run, batch))
    assert run.policy.decoder.backward == "bf16"  # which the run goes on with
    assert all(parameter.grad is None for _, parameter in run.policy.named_parameters())
    assert all(torch.equal(tensor, masters[name]) for name, tensor in run.masters().items())
    exact, fp8 = gradients_of(run, batch, "bf16"), gradients_of(run, batch, "fp8")
    h, g = torch.cat(list(exact.values())), torch.cat(list(fp8.values()))
    # The passes' weights are made in float32 in another order; a weight that rounds otherwise may turn a code over.
    error = float((g - h).norm() / h.norm())
    assert 0.005 < error < 0.1
    assert found.metrics["backward/relative_error"] == pytest.approx(error, rel=1e-2)
    assert found.metrics["backward/cosine"] == pytest.approx(float(g @ h / g.norm() / h.norm()), rel=1e-5)
    linears = [f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"]
    linears += [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")]
    assert sorted(found.modules) == sorted(linears)
    for name, (cosine, relative) in found.modules.items():
        g, h = fp8[f"{name}.weight"], exact[f"{name}.weight"]
        assert relative == pytest.approx(float((g - h).norm() / h.norm()), rel=2e-2), name
        assert cosine == pytest.approx(float(g @ h / g.norm() / h.norm()), rel=1e-4), name
    assert found.metrics["backward/cosine_min"] == min(cosine for cosine, _ in found.modules.values())


class Made:
    """Passes that give gradients made up beforehand, for linears `a` and `b`, a norm and what no gradient comes to."""

    def __init__(self, exact: list[Tensor], fp8: list[Tensor]) -> None:
        names = [*("a.weight", "b.weight", "norm.weight")[: len(exact)], "unused.bias"]
        self.policy = SimpleNamespace(
            weights=SimpleNamespace(fused=True),
            decoder=SimpleNamespace(backward="bf16"),
            linears={"a": None, "b": None},
            named_parameters=lambda: [(name, None) for name in names],
        )
        self.made = {"bf16": [*exact, None], "fp8": [*fp8, None]}

    def gradients(self, one: object) -> list[Tensor | None]:
        return self.made[self.policy.decoder.backward]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_they_are_those_of_the_gradients_in_float64_a_chunk_at_a_time(monkeypatch):
    monkeypatch.setattr(backward, "CHUNK", 7)
    exact = [random(5, 4, seed=1), random(3, 4, seed=2), random(4, seed=3)]
    noise = [1e-3, 2e-3, 0.5]
    fp8 = [h + size * random(*h.shape, seed=9) for h, size in zip(exact, noise, strict=True)]
    found = backward_error(Made(exact, fp8))
    h, g = (torch.cat([t.double().flatten() for t in one]) for one in (exact, fp8))
    assert found.metrics["backward/cosine"] == pytest.approx(float(g @ h / (g.norm() * h.norm())), rel=1e-12)
    assert found.metrics["backward/relative_error"] == pytest.approx(float((g - h).norm() / h.norm()), rel=1e-12)
    b, kept = fp8[1].double().flatten(), exact[1].double().flatten()
    cosine = float(b @ kept / (b.norm() * kept.norm()))
    assert found.modules.keys() == {"a", "b"}
    assert found.metrics["backward/cosine_min"] == found.modules["b"][0] == pytest.approx(cosine, rel=1e-12)
    assert found.modules["b"][1] == pytest.approx(float((b - kept).norm() / kept.norm()), rel=1e-12)


def test_what_faded_to_zero_has_cosine_0_and_what_is_zero_anyway_is_left_out():
    some, none = random(3, 3, seed=1), torch.zeros(3, 3)
    assert backward_error(Made([some, some], [some, none])).modules == {
        "a": (pytest.approx(1.0), 0.0),
        "b": (0.0, pytest.approx(1.0)),
    }
    assert backward_error(Made([some, none], [some, none])).modules.keys() == {"a"}
    nothing = backward_error(Made([none, none], [none, none]))
    assert nothing.metrics == {} and nothing.modules == {}


def test_what_is_not_finite_is_the_worst_and_stays_nan():
    exact = [random(2, 2, seed=1), random(2, 2, seed=2)]
    broken = exact[1].clone()
    broken[0, 0] = math.inf
    found = backward_error(Made(exact, [exact[0], broken]))
    assert math.isnan(found.metrics["backward/cosine"]) and math.isnan(found.metrics["backward/cosine_min"])
    assert not math.isfinite(found.metrics["backward/relative_error"])
    assert found.modules["a"] == (pytest.approx(1.0), 0.0) and worst_module(found.modules) == "b"


def test_a_run_on_a_cpu_is_refused_in_one_line(llama):
    config = parts(llama).config
    require_fp8_backward(config, torch.device("cpu"))
    asked = config.model_copy(update={"diagnostics": config.diagnostics.model_copy(update={"backward_every": 2})})
    with pytest.raises(UserError, match=r"^diagnostics\.backward_every: .* in plain torch; set 0$"):
        require_fp8_backward(asked, torch.device("cpu"))


@pytest.mark.parametrize(("capability", "refused"), [((8, 0), True), ((8, 9), False)])
def test_a_gpu_without_fp8_products_is_refused(llama, monkeypatch, capability, refused):
    config = parts(llama, diagnostics={"backward_every": 1}).config
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if not refused:
        require_fp8_backward(config, torch.device("cuda"))
        return
    with pytest.raises(UserError, match=r"needs compute capability 8\.9 or later, and this GPU has 8\.0; set 0"):
        require_fp8_backward(config, torch.device("cuda"))
