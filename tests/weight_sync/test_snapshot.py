"""A publish proves that the sampler holds every tensor of the version, and a sampler that does not draws nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from qarl_formats.registry import make_scheme
from torch import Tensor

from qarl.config import ModelConfig, QuantConfig, RolloutConfig
from qarl.policy.load import load_model, load_tokenizer
from qarl.policy.policy import Policy
from qarl.rollout.engine import SamplingParams
from qarl.rollout.native.engine import NativeEngine
from qarl.types import Prompt
from qarl.weight_sync.fingerprints import PublishError, fingerprints, verify
from qarl.weight_sync.snapshot import Snapshot, describe

PROMPTS = [Prompt(0, [5, 6, 7], "", {})]
SAMPLING = SamplingParams(2, 0, 5)
PACKED = "model.layers.1.mlp.up_proj.weight_packed"
Held = list[tuple[str, Tensor]]


@pytest.fixture
def policy(tiny_model) -> Policy:
    quant = QuantConfig(scheme="w4a16", group_size=32)
    model = load_model(ModelConfig(path=str(tiny_model("qwen2"))))
    return Policy(model, make_scheme("w4a16", 32), quant, torch.bfloat16, torch.device("cpu"))


@pytest.fixture
def engine(policy: Policy, tiny_model) -> NativeEngine:
    made = NativeEngine(policy.sampler, load_tokenizer(ModelConfig(path=str(tiny_model("qwen2")))), RolloutConfig())
    made.publish(policy.current)
    return made


def next_version(policy: Policy) -> Snapshot:
    """The learner takes a step."""
    with torch.no_grad():
        for _, master in policy.named_parameters():
            master.add_(torch.randn_like(master) * 0.05)
    return policy.refresh(policy.version + 1)


def drop(held: Held) -> Held:
    return [pair for pair in held if pair[0] != PACKED]


def alter_one_byte(held: Held) -> Held:
    def altered(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        copy.view(torch.uint8)[0, 0] ^= 1
        return copy

    return [(name, altered(t) if name == PACKED else t) for name, t in held]


def change(to: Callable[[Tensor], Tensor]) -> Callable[[Held], Held]:
    return lambda held: [(name, to(t) if name == PACKED else t) for name, t in held]


def add_unknown(held: Held) -> Held:
    return [*held, ("model.layers.9.stray", torch.zeros(1))]


FAULTS = {
    "a missing tensor": (drop, rf"version 1 is partial: 1 of \d+ .*'{PACKED}'"),
    "an altered byte": (alter_one_byte, rf"version 1: '{PACKED}' differs .*bytes"),
    "another dtype": (change(lambda t: t.view(torch.float32)), rf"version 1: '{PACKED}' .*float32 .* for torch.int32"),
    "another shape": (change(lambda t: t.t().contiguous()), rf"version 1: '{PACKED}' .*\(8, 128\) for .*\(128, 8\)"),
    "an unknown tensor": (add_unknown, "version 1: .*'model.layers.9.stray', which was not sent"),
    "nothing at all": (lambda held: [], "version 1 is partial"),
}


@pytest.fixture(params=FAULTS)
def fault(request, engine, monkeypatch) -> str:
    """Makes what the sampler holds go wrong on the way; the pattern of the message that must name it."""
    damage, message = FAULTS[request.param]
    truth = engine.sampler.held

    def held() -> Iterator[tuple[str, Tensor]]:
        yield from damage(list(truth()))

    monkeypatch.setattr(engine.sampler, "held", held)
    return message


def test_a_damaged_publish_is_refused_by_tensor_and_version(engine, policy, fault: str):
    snapshot = next_version(policy)
    with pytest.raises(PublishError, match=fault):
        engine.publish(snapshot)


@pytest.mark.parametrize("version", [0, 1])
def test_nothing_is_generated_after_a_damaged_publish(engine, policy, fault: str, version: int):
    with pytest.raises(PublishError):
        engine.publish(next_version(policy))
    assert engine.version is None
    with pytest.raises(PublishError, match="nothing was published"):
        engine.generate(PROMPTS, SAMPLING, version)


def test_a_stale_snapshot_is_refused_by_its_version(engine, policy):
    stale = policy.current
    next_version(policy)
    with pytest.raises(PublishError, match=r"version 0: the learner is at version 1"):
        engine.publish(stale)
    with pytest.raises(PublishError, match="nothing was published"):
        engine.generate(PROMPTS, SAMPLING, 0)


def test_a_stale_sampler_does_not_draw_for_the_new_version(engine, policy):
    next_version(policy)
    with pytest.raises(PublishError, match=r"policy is at version 1 .* holds version 0"):
        engine.generate(PROMPTS, SAMPLING, 1)


def test_a_stale_sampler_does_not_draw_for_its_own_version_either(engine, policy):
    """Its embeddings and norms are the learner's, which have moved."""
    next_version(policy)
    with pytest.raises(PublishError, match=r"requantized \(version 1\) after the sampler got version 0"):
        engine.generate(PROMPTS, SAMPLING, 0)


def test_every_rollout_carries_the_version_that_drew_it(engine, policy):
    before = engine.generate(PROMPTS, SAMPLING, 0)
    engine.publish(next_version(policy))
    after = engine.generate(PROMPTS, SAMPLING, 1)
    assert ([r.version for r in before], [r.version for r in after]) == ([0, 0], [1, 1])


def test_a_publish_changes_what_is_drawn(engine, policy):
    before = engine.generate(PROMPTS, SAMPLING, 0)
    engine.publish(next_version(policy))
    assert [r.logprobs for r in engine.generate(PROMPTS, SAMPLING, 1)] != [r.logprobs for r in before]


def test_the_manifest_lists_every_tensor_in_order(policy):
    snapshot = policy.current
    assert list(snapshot.manifest().records) == list(snapshot.tensors)


def test_the_sampler_holds_exactly_the_snapshots_tensors(policy):
    held = dict(policy.sampler.held())
    tensors = policy.current.tensors
    assert held.keys() == tensors.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.int64])
def test_a_digest_sees_one_bit(dtype: torch.dtype):
    tensor = torch.zeros(3, 5).to(dtype)
    other = tensor.clone()
    other.view(torch.uint8)[-1, -1] ^= 1
    assert describe(tensor) != describe(other)


def test_a_digest_is_of_the_values_in_order_not_of_the_strides():
    tensor = torch.arange(6).view(2, 3)
    assert describe(tensor.t()) == describe(tensor.t().contiguous())


def test_a_digest_tells_tensors_of_the_same_bytes_apart_by_shape_and_dtype():
    records = [describe(torch.zeros(4)), describe(torch.zeros(2, 2)), describe(torch.zeros(4, dtype=torch.int32))]
    assert records[0] != records[1] != records[2] and len({r.sha256 for r in records}) == 1


def test_verify_accepts_any_order_of_arrival(policy):
    held = fingerprints(reversed(list(policy.sampler.held())))
    verify(0, policy.current.fingerprints, held)


def test_fingerprints_of_a_snapshot_are_computed_once(policy):
    snapshot = policy.current
    assert snapshot.fingerprints is snapshot.fingerprints
    assert list(snapshot.fingerprints) == list(snapshot.tensors)


def test_fingerprints_of_a_snapshot_are_those_of_its_tensors(policy):
    assert policy.current.fingerprints == fingerprints(policy.current.tensors.items())
