"""`quant.kernels: auto` against `reference` on a CUDA device: log-probs and gradients of policies.

Codes, products and their rows are compared by tests/kernels, which run on the device too, and by test_gpu_kernels.py.
"""

import pytest
import torch
from policy_models import parts_of
from qarl_formats.registry import make_scheme
from qarl_formats.schemes.bf16 import OrdinaryProduct
from qarl_kernels.logprob import Truncation
from torch import Tensor

from qarl.config import ModelConfig, QuantConfig
from qarl.policy.linear import WeightSet
from qarl.policy.load import load_model
from qarl.policy.policy import Policy

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _fp8_needs_ada(request: pytest.FixtureRequest) -> None:
    parameters = getattr(request.node, "callspec", None)
    if (
        parameters
        and parameters.params.get("scheme") in ("fp8", "fp8_block")
        and torch.cuda.get_device_capability() < (8, 9)
    ):
        pytest.skip("fp8 kernels need compute capability 8.9")


def _policy(directory, scheme: str, kernels: str, **changes) -> Policy:
    quant = QuantConfig(scheme=scheme, kernels=kernels, **changes)
    made = make_scheme(scheme, quant.group_size, quant.symmetric, quant.grid, quant.scale_dtype)
    return Policy(load_model(ModelConfig(path=str(directory))), made, quant, torch.bfloat16, CUDA)


def _logprobs(policy: Policy, weights: WeightSet | None = None) -> Tensor:
    tokens = torch.randint(3, 259, (6, 40), generator=torch.Generator().manual_seed(0)).tolist()
    return policy.logprobs(tokens[:3], tokens[3:], Truncation(), 50, weights=weights)[0]


POLICIES = [
    ("bf16", {}),
    ("w8a8", {}),
    ("fp8", {}),
    ("fp8_block", {}),
    ("nvfp4a16", {}),
    ("w4a16", {"group_size": 32}),
    ("w4a8", {"group_size": 32}),
]


@pytest.mark.parametrize(("scheme", "changes"), POLICIES)
def test_an_aligned_policy_agrees_with_the_reference(tiny_model, scheme: str, changes: dict) -> None:
    auto, reference = (_policy(tiny_model("qwen3"), scheme, kernels, **changes) for kernels in ("auto", "reference"))
    assert auto.current.manifest() == reference.current.manifest(), "other codes or values were published"
    found, expected = _logprobs(auto), _logprobs(reference)
    assert float((found - expected).norm() / expected.norm()) < 0.02
    found.sum().backward()
    expected.sum().backward()
    for (name, one), (_, other) in zip(auto.named_parameters(), reference.named_parameters(), strict=True):
        assert one.grad.isfinite().all(), name
        error = float((one.grad - other.grad).norm() / other.grad.norm())
        # bf16 activations that differ by an ulp, through every layer; FP8 sums keep 14 bits (fast accumulation)
        # and codes of activations that turn over with them
        assert error < (0.15 if scheme.startswith("fp8") else 0.1), f"{name}: {error:.3f}"


def _by_kernels(weights: WeightSet) -> bool:
    """Whether every linear of a policy is multiplied by a kernel of Triton, on layers of such kernels."""
    schemes = [part.weight.scheme for part in parts_of(weights)]
    return weights.fused and not any(isinstance(scheme, OrdinaryProduct) for scheme in schemes)


@pytest.mark.parametrize(("scheme", "changes"), POLICIES)
def test_learner_and_sampler_of_a_policy_have_the_same_bits(tiny_model, scheme: str, changes: dict) -> None:
    policy = _policy(tiny_model("qwen3"), scheme, "auto", **changes)
    assert _by_kernels(policy.weights)
    with torch.no_grad():
        learner = _logprobs(policy)
        assert torch.equal(_logprobs(policy, policy.sampler.weights), learner)
