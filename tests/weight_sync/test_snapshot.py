"""A publish verifies that the sampler holds every tensor of the version; otherwise it generates nothing."""

import pytest
import torch
from policy_models import make_policy
from torch import Tensor

from qarl.config import ModelConfig, RolloutConfig
from qarl.policy.load import load_tokenizer
from qarl.policy.policy import Policy
from qarl.rollout.engine import SamplingParams
from qarl.rollout.native.engine import NativeEngine
from qarl.types import Prompt
from qarl.weight_sync.fingerprints import PublishError, fingerprints
from qarl.weight_sync.snapshot import Snapshot

PROMPTS = [Prompt(0, [5, 6, 7], "", {})]
SAMPLING = SamplingParams(2, 0, 5)
PACKED = "model.layers.1.mlp.up_proj.weight_packed"


@pytest.fixture
def policy(tiny_model) -> Policy:
    return make_policy(tiny_model("qwen2"), "w4a16", torch.bfloat16, 32)


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


def one_byte(tensor: Tensor) -> Tensor:
    altered = tensor.clone()
    altered.view(torch.uint8)[0, 0] ^= 1
    return altered


# What happens to the tensors that the sampler holds -> the pattern of the error.
FAULTS = {
    "a missing tensor": (
        lambda held: [pair for pair in held if pair[0] != PACKED],
        rf"version 1 is partial: 1 of \d+ .*'{PACKED}'",
    ),
    "an altered byte": (
        lambda held: [(name, one_byte(t) if name == PACKED else t) for name, t in held],
        rf"version 1: '{PACKED}' differs .*bytes",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_publish_is_refused_by_tensor_and_version_and_nothing_is_generated(
    engine, policy, monkeypatch, fault: str
):
    damage, message = FAULTS[fault]
    truth = engine.sampler.held
    monkeypatch.setattr(engine.sampler, "held", lambda: iter(damage(list(truth()))))
    with pytest.raises(PublishError, match=message):
        engine.publish(next_version(policy))
    assert engine.version is None
    for version in (0, 1):
        with pytest.raises(PublishError, match="nothing was published"):
            engine.generate(PROMPTS, SAMPLING, version)


def test_a_stale_snapshot_is_refused_by_its_version(engine, policy):
    stale = policy.current
    next_version(policy)
    with pytest.raises(PublishError, match=r"version 0: the learner is at version 1"):
        engine.publish(stale)
    with pytest.raises(PublishError, match="nothing was published"):
        engine.generate(PROMPTS, SAMPLING, 0)


def test_a_stale_sampler_generates_neither_for_the_new_version_nor_for_its_own(engine, policy):
    """Its embeddings and norms are the learner's, which have changed."""
    next_version(policy)
    with pytest.raises(PublishError, match=r"policy is at version 1 .* holds version 0"):
        engine.generate(PROMPTS, SAMPLING, 1)
    with pytest.raises(PublishError, match=r"requantized \(version 1\) after the sampler got version 0"):
        engine.generate(PROMPTS, SAMPLING, 0)


def test_a_publish_changes_what_is_sampled_and_the_version_of_rollouts(engine, policy):
    before = engine.generate(PROMPTS, SAMPLING, 0)
    engine.publish(next_version(policy))
    after = engine.generate(PROMPTS, SAMPLING, 1)
    assert ([r.version for r in before], [r.version for r in after]) == ([0, 0], [1, 1])
    assert [r.logprobs for r in after] != [r.logprobs for r in before]


def test_sampler_manifest_and_fingerprints_have_exactly_the_snapshots_tensors(policy):
    snapshot, held = policy.current, dict(policy.sampler.held())
    assert held.keys() == snapshot.tensors.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in snapshot.tensors.items())
    assert list(snapshot.manifest().records) == list(snapshot.fingerprints) == list(snapshot.tensors)
    assert snapshot.fingerprints == fingerprints(snapshot.tensors.items())
    assert snapshot.fingerprints is snapshot.fingerprints  # computed once
