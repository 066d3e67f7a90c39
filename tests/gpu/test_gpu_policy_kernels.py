"""`quant.kernels: auto` against `reference` on a CUDA device: gradients of linears, log-probs, gradients of policies.

Codes, products and their rows are compared by tests/kernels, which run on the device too, and by test_gpu_kernels.py.
"""

import pytest
import torch
from policy_models import OneLinear, parts_of
from qarl_formats.registry import make_scheme
from qarl_formats.scheme import Scheme
from qarl_formats.schemes.bf16 import OrdinaryProduct
from qarl_formats.weight import LowBitWeight, quantize_weight
from qarl_kernels.logprob import Truncation
from torch import Tensor, nn

from qarl.config import ModelConfig, QuantConfig
from qarl.policy.linear import WeightSet
from qarl.policy.load import load_model
from qarl.policy.policy import Policy

CUDA = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16]
SCHEMES = (
    [("bf16", {}), ("w8a8", {}), ("fp8", {}), ("fp8_block", {}), ("nvfp4a16", {})]
    + [(name, {"group_size": group}) for name in ("w4a16", "w4a8") for group in (32, 64, 128, -1)]
    + [("w4a16", {"group_size": 64, "symmetric": False})]
)


@pytest.fixture(autouse=True)
def _fp8_needs_ada(request: pytest.FixtureRequest) -> None:
    parameters = getattr(request.node, "callspec", None)
    if (
        parameters
        and parameters.params.get("scheme") in ("fp8", "fp8_block")
        and torch.cuda.get_device_capability() < (8, 9)
    ):
        pytest.skip("fp8 kernels need compute capability 8.9")


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _made(scheme: str, changes: dict, dtype: torch.dtype = torch.bfloat16) -> Scheme:
    return make_scheme(scheme, **changes, scale_dtype=str(dtype).removeprefix("torch."))


# --- one linear


def _linear(scheme: Scheme, dtype: torch.dtype, kernels: bool, n: int = 320, k: int = 256) -> OneLinear:
    torch.manual_seed(0)
    linear = nn.Linear(k, n).cuda()
    master = linear.weight.detach()
    values = LowBitWeight.of_values(master.to(dtype))
    weight = quantize_weight(master, scheme, "w") if scheme.quantized else values
    return OneLinear(linear, weight.prepare(dtype, kernels), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("scheme", "changes"), SCHEMES)
def test_gradients_of_a_linear_agree_with_the_reference(scheme: str, changes: dict, dtype: torch.dtype) -> None:
    made = _made(scheme, changes, dtype)
    grads = []
    for kernels in (True, False):
        linear = _linear(made, dtype, kernels)
        for seed in (1, 2):  # the second is added to the first in place
            x = _random(65, 256, seed=seed).to(CUDA, dtype).requires_grad_()
            linear(x).backward(_random(65, 320, seed=seed + 2).to(CUDA, dtype))
        grads.append((x.grad, linear.weight.grad, linear.bias.grad))
    # the reference multiplies codes in float32, the kernels' backward 16-bit weights: dx differs by their rounding
    for found, expected in zip(*grads, strict=True):
        assert found.dtype == expected.dtype
        assert float((found.float() - expected.float()).norm() / expected.float().norm()) < 4 * torch.finfo(dtype).eps


# --- a policy


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
