"""Between the forward and the backward of a micro-batch nothing synchronizes with the device.

The device is torch's `meta`, whose tensors have no values, so that reading one raises.
`tests/gpu/test_gpu_no_sync.py` has whole micro-batches on a GPU.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from objective_sections import objective_config
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from qarl.batch.batch import CPU, Batch, Part
from qarl.batch.columns import Column
from qarl.config import CorrectionConfig
from qarl.objectives.common import Constants, TokenLogProbs
from qarl.objectives.correction_config import RejectRule
from qarl.objectives.objective import build_objective
from qarl.objectives.registry import BY_NAME
from qarl.objectives.segments import Totals
from qarl.training.totals import LearnerTotals
from qarl.utils import transfer

META = torch.device("meta")
RULES = [
    RejectRule(estimator="k3", aggregate="sum", upper=0.05, signal="rollout"),
    RejectRule(estimator="ratio", aggregate="mean", lower=0.98, upper=1.03),
    RejectRule(estimator="k1", aggregate="max", lower=-0.5, upper=0.5),
    RejectRule(estimator="ratio", aggregate="token", upper=3.0),
]
CORRECTIONS = {
    "none": CorrectionConfig(),
    "token": CorrectionConfig(level="token", mode="mask", lower=0.8, upper=1.1, reject=RULES, veto=0.5),
    "sequence": CorrectionConfig(level="sequence", mode="truncate", upper=2.0, signal="rollout"),
}
PENALTIES = {"kl_coef": 0.1, "entropy_coef": 0.05}
SECTIONS = [
    *({"name": name} for name in sorted(BY_NAME) if name not in ("custom", "distill")),
    *({"name": "grpo", "ratio": ratio, **PENALTIES} for ratio in ("train", "rollout", "shadow", "one")),
    *({"name": "grpo", "loss": loss} for loss in ("detach", "detach_center", "no_clip")),
    {"name": "gspo", "aggregation": "token-mean", "dvp_outside": "token"},
]
CASES = [
    pytest.param(section, correction, id="-".join(map(str, (*section.values(), name))))
    for section in SECTIONS
    for name, correction in CORRECTIONS.items()
    if name == "none" or section == {"name": "grpo"}
]
WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "unique", "item")


class Refuse(TorchDispatchMode):
    """Raises if a value is read from the device, or copied to it without `upload`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        devices = {x.device.type for x in [*args, *(kwargs or {}).values()] if isinstance(x, Tensor)}
        name = func.overloadpacket.__name__
        there = "meta" in devices
        assert not (there and name in WAITS), f"{name} waits for the device"
        if there and name == "index":
            assert all(x is None or x.dtype != torch.bool for x in args[1]), "an index by a mask waits for the device"
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and "cpu" in devices and result.device.type == "meta" and name == "_to_copy":
            assert _uploading(), "a copy to the device that waits"
        return result


class RefuseNumbers(TorchFunctionMode):
    """Raises if a tensor on the device is created from Python numbers."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor):
            assert result.device.type == "cpu", "numbers as a tensor on the device are a copy that waits"
        return result


def _uploading() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is transfer.upload.__code__:
            return True
        frame = frame.f_back
    return False


@contextmanager
def no_waits() -> Iterator[None]:
    with Refuse(), RefuseNumbers():
        yield


def ragged(device: torch.device, groups: int = 4) -> Batch:
    """Return a batch of groups of three responses of different lengths, with the sampler's log-probs."""
    rng, count = random.Random(0), 3 * groups
    responses = [[1] * rng.randint(1, 20) for _ in range(count)]
    of_group = [i // 3 for i in range(count)]
    generator = torch.Generator().manual_seed(0)
    sampled = Column([-torch.rand(len(r), generator=generator) for r in responses])
    advantages = torch.linspace(-1.0, 1.2, count)
    return Batch(0, device, [[g] * (2 + g) for g in of_group], responses, of_group, advantages, sampled)


def forwards(part: Part, seed: int) -> list[Tensor]:
    """Return random logp (with gradient), logp_old, shadow, reference and entropy: (T,) each on the part's device."""
    generator = torch.Generator().manual_seed(seed)
    values = [-torch.rand(part.tokens, generator=generator) for _ in range(5)]
    return [x.to(part.device).requires_grad_(at in (0, 4)) for at, x in enumerate(values)]


def micro_batch(objective, part: Part, minibatch: Part, totals: LearnerTotals, logp: Tensor, others: list[Tensor]):
    """Do what `learn` does with a micro-batch, except for the policy's forward and backward."""
    batch = part.batch
    old, shadow, reference, entropy = others
    if not batch.logp_old.known(part):
        batch.logp_old.fill(part, old)
        totals.add_snapshot(entropy)
        totals.retained.append(old)
    batch.logp.fill(part, logp)
    batch.logp_ref.fill(part, reference)
    logps = TokenLogProbs(logp, part.logp_old, part.logp_sampler, shadow, batch.logp_ref.read(part), entropy)
    loss, stats = objective(
        logps, part.advantages, part.segments, Totals(len(minibatch), minibatch.tokens, 32), Constants()
    )
    loss.backward()
    totals.add_loss(loss, stats)


@pytest.mark.parametrize(("section", "correction"), CASES)
def test_a_micro_batch_asks_the_device_for_nothing(section, correction):
    objective = build_objective(objective_config(**section), correction)
    whole, totals = ragged(META, groups=2).whole(), LearnerTotals()
    parts = whole.micro_batches(60)
    assert len(parts) > 1
    for number, part in enumerate(parts):
        logp, *others = forwards(part, number)
        with no_waits():
            micro_batch(objective, part, whole, totals, logp, others)
        assert logp.grad is not None and logp.grad.shape == logp.shape
    with pytest.raises((RuntimeError, NotImplementedError)):
        totals.metrics(1)  # which is where the step waits


def test_a_column_comes_to_the_cpu_when_it_is_read_there(monkeypatch):
    """In one copy, however many parts filled it."""
    batch = ragged(CPU)
    parts = batch.whole().micro_batches(30)
    for part in parts:
        batch.logp_old.fill(part, torch.zeros(part.tokens, device=META))
    copies = []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: copies.append(x.shape) or torch.arange(float(len(x))))
    whole = batch.whole().logp_old
    assert copies == [(len(whole),)] and torch.equal(whole, torch.arange(float(len(whole))))
    assert torch.equal(torch.cat(list(batch.logp_old)), whole) and len(copies) == 1
