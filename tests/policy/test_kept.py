"""Earlier versions of asynchronous rollouts: on the device and in host memory they give the same bits."""

import gc
import weakref

import pytest
import torch
from policy_models import make_policy, parts_of
from qarl_kernels.logprob import Truncation

from qarl.policy.kept import KeptVersions
from qarl.policy.linear import WeightSet
from qarl.policy.policy import Policy

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SCHEMES = [("bf16", None), ("w8a8", None), ("nvfp4a16", None)]
CASES = [("qwen3", *scheme, "aligned") for scheme in SCHEMES] + [("qwen3_moe", "w4a16", 32, "aligned")]
CASES += [("qwen3", "w8a8", None, "fake_quant")]


def logprobs(policy: Policy, weights: WeightSet | None = None) -> torch.Tensor:
    return policy.logprobs([[5, 6, 7]], [[9, 10, 11, 12]], Truncation(), 8, weights=weights)[0].detach()


def updated(policy: Policy) -> None:
    """Give the policy other masters and publish them as the next version."""
    with torch.no_grad():
        for number, (_, master) in enumerate(policy.named_parameters()):
            noise = torch.randn(master.shape, generator=torch.Generator().manual_seed(number))
            master.add_(noise.to(DEVICE), alpha=0.1)
    policy.refresh(policy.version + 1)
    policy.sampler.install(policy.current)


def two_versions(policy: Policy, on_host: bool) -> KeptVersions:
    kept = KeptVersions(policy, on_host)
    for _ in range(2):
        kept.add(policy.current, policy.weights)
        updated(policy)
    return kept


@pytest.mark.parametrize(("family", "scheme", "group", "learner"), CASES)
def test_host_memory_gives_the_bits_of_the_device(tiny_model, family, scheme, group, learner):
    policy = make_policy(tiny_model(family), scheme, torch.bfloat16, group, DEVICE, learner=learner)
    first = logprobs(policy)
    updated(policy)
    second = logprobs(policy)
    assert not torch.equal(first, second)
    for on_host in (False, True):
        policy = make_policy(tiny_model(family), scheme, torch.bfloat16, group, DEVICE, learner=learner)
        kept = two_versions(policy, on_host)
        for version, expected in ((0, first), (1, second), (0, first)):
            assert torch.equal(logprobs(policy, kept.weights(version)), expected)
        digests = [kept.on_device(version).manifest().digest() for version in (0, 1)]
        assert digests == [kept.snapshot(version).manifest().digest() for version in (0, 1)]


def test_only_the_newest_version_and_one_copy_are_on_the_device(tiny_model):
    policy = make_policy(tiny_model("llama"), "w4a16", torch.bfloat16, 32, DEVICE)
    kept = KeptVersions(policy, on_host=True)
    kept.add(policy.current, policy.weights)
    first = weakref.ref(policy.current.tensors["model.layers.0.mlp.gate_proj.weight_packed"])
    operand = weakref.ref(next(iter(parts_of(policy.weights)[0].weight.operands.values())))
    updated(policy)
    kept.add(policy.current, policy.weights)
    gc.collect()
    assert first() is None and operand() is None, "the device's tensors are referenced"
    assert kept.weights(1) is policy.weights, "the newest version is not copied"
    host = kept.snapshot(0)
    storages = {t.untyped_storage().data_ptr() for n, t in host.tensors.items() if not n.endswith("weight_shape")}
    assert len(storages) == 1, "a copy back is one transfer"
    assert all(tensor.device.type == "cpu" for tensor in host.tensors.values())
    assert host.tensors["model.norm.weight"].is_pinned() == ON_GPU
    copied = weakref.ref(kept.weights(0))
    assert kept.weights(0) is copied(), "forwards of one step share a copy"
    kept.release()
    gc.collect()
    assert copied() is None
    kept.keep([1])
    assert 0 not in kept and 1 in kept
