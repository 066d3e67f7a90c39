"""The weights of the exact model in vLLM: loaded from a checkpoint, filled by publishes, read back and verified."""

from typing import Any

import pytest
import torch
from tiny_runs import parts

from qarl.rollout.published_weights import PublishedWeights
from qarl.weight_sync.fingerprints import PublishError

CPU = torch.device("cpu")
BYTES: dict[str, Any] = {"group_size": None}
# family, quantization
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("qwen2", {"scheme": "bf16", **BYTES}),
    "w8a8": ("qwen2", {"scheme": "w8a8", **BYTES}),
    "fp8": ("llama", {"scheme": "fp8", **BYTES}),
    "w4a8": ("llama", {"scheme": "w4a8"}),
    "nvfp4a16": ("llama", {"scheme": "nvfp4a16", **BYTES}),
    "experts in w4a16": ("qwen3_moe", {"scheme": "w4a16"}),
    "experts in w8a8": ("qwen2_moe", {"scheme": "w8a8", **BYTES}),
    "experts in bf16": ("mixtral", {"scheme": "bf16", **BYTES}),
}


# With kernels as on a GPU; the interpreter packs int4 slowly.
WITH_KERNELS = ("bf16", "fp8", "nvfp4a16", "experts in w8a8")


@pytest.fixture
def case(name: str, tiny_model) -> Any:
    family, quant = CASES[name]
    small = {"num_hidden_layers": 1, "intermediate_size": 96}
    if family == "qwen3_moe":
        small |= {"mlp_only_layers": None, "num_experts": 2, "moe_intermediate_size": 32}
    return parts(tiny_model(family, **small), quant=quant)


def made(case: Any, kernels: bool) -> PublishedWeights:
    """Return weights loaded from separate tensors per expert, as in a checkpoint. kernels: For Triton, as on a GPU."""
    policy = case.policy
    config, ignore = policy.model.config, policy.quant.ignore
    weights = PublishedWeights(config, policy.scheme, ignore, 64, torch.bfloat16, CPU, False)
    weights._kernels = kernels
    weights.load(policy.current.tensors)
    return weights


def changed(case: Any) -> Any:
    generator = torch.Generator().manual_seed(case.policy.version)
    with torch.no_grad():
        for parameter in case.policy.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    case.policy.refresh(case.policy.version + 1)
    return case.policy.current


@pytest.mark.parametrize(
    ("name", "kernels"), [*((name, False) for name in CASES), *((name, True) for name in WITH_KERNELS)]
)
def test_full_and_partial_publishes_fill_the_same_memory_and_are_verified(case: Any, kernels: bool) -> None:
    weights = made(case, kernels)
    weights.check(0, case.policy.current.fingerprints)
    held = addresses(weights)
    snapshot = changed(case)
    with pytest.raises(PublishError):
        weights.check(1, snapshot.fingerprints)
    rest = dict(snapshot.published)
    # A delta may bring one tensor of a packed linear. Of nvfp4a16 its parts share a scale, so they change together.
    in_parts = ("layers.0.self_attn.k_proj.", "layers.0.mlp.experts.w13.")
    shared = case.policy.scheme.name == "nvfp4a16"
    for name in [n for n in rest if n.removeprefix("model.").startswith(in_parts) and not shared]:
        tensor = rest.pop(name)
        before = weights.base(name) if not name.endswith("weight_shape") else tensor
        assert (before.shape, before.dtype) == (tensor.shape, tensor.dtype), name
        weights.load({name: tensor})
    with pytest.raises(PublishError):
        weights.check(1, snapshot.fingerprints)
    weights.load(rest)
    weights.check(1, snapshot.fingerprints)
    assert addresses(weights) == held
    group = next(iter(weights._weights.values()))
    next(iter(group[0].operands.values())).view(torch.uint8).flatten()[0] ^= 1
    with pytest.raises(PublishError, match=r"publish of version 1: .*model\.layers\.0\.self_attn"):
        weights.check(1, snapshot.fingerprints)  # an operand changed by itself


def addresses(weights: PublishedWeights) -> dict[int, int]:
    return {id(t): t.data_ptr() for group in weights._weights.values() for w in group for t in w.operands.values()}
