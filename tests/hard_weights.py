"""Master weights that are hard to quantize, for tests of the formats and of the kernels."""

import torch
from torch import Tensor

N, K = 24, 256


def normal(seed: int) -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(seed))


def common() -> dict[str, Tensor]:
    """Return the weights that are hard for every scheme, by name."""
    return {
        "normal": normal(0),
        "small": normal(1) * 0.02,
        "zero": torch.zeros(N, K),
        "negative zero": torch.full((N, K), -0.0),
        "zero rows": normal(2).index_fill(0, torch.tensor([0, 7]), 0.0),
        "all negative": -normal(4).abs() - 0.5,
        "all positive": normal(5).abs() + 0.5,
        "constant rows": torch.linspace(-2, 2, N)[:, None].expand(N, K).contiguous(),
        "tiny": normal(6) * 1e-30,
        "smallest subnormals": torch.randint(-3, 4, (N, K)) * 2.0**-149,
        "near the fp32 limit": normal(10).clamp(-3, 3) * 1e38,
        "absmax of both signs": normal(12).sign() * 0.37,
    }


def _adversarial() -> dict[str, Tensor]:
    weights = common() | {
        "scale underflow": normal(7) * 1e-40,
        "fp16 scale underflow": normal(8) * 1e-7,
        "fp16 scale overflow": normal(9) * 1e6,
        "one sign near the fp32 limit": normal(11).abs().clamp(max=3) * 1e38,
    }
    weights["zero groups"] = normal(13)
    weights["zero groups"][:, 64:96] = 0.0
    weights["zero groups"][3, 128:] = 0.0
    weights["single outlier"] = normal(14) * 1e-3
    weights["single outlier"][:, 5] = 3e4
    # Quotients exactly halfway: the group's absmax makes the scale a power of two, all else is (j + 1/2) * scale.
    for name, absmax in (("int4 ties", 7.5), ("int8 ties", 127.5), ("asymmetric ties", 7.0)):
        halves = torch.randint(-14, 14, (N, K), generator=torch.Generator().manual_seed(18)).float() / 2
        halves[:, ::32] = absmax
        halves[:, 1::32] = -8.0 if name == "asymmetric ties" else -absmax
        weights[name] = halves * 2.0**-6
    weights["fp8 ties"] = torch.randint(-36, 37, (N, K), generator=torch.Generator().manual_seed(19)).float() / 2
    weights["fp8 ties"][:, 0] = 448.0
    return weights


def _nvfp4() -> dict[str, Tensor]:
    weights = common() | {
        "the global scale overflows": normal(7) * 1e-37,
        "subnormal": normal(8) * 1e-40,
        "groups of every size": normal(13) * torch.logspace(-9, 2, K // 16).repeat_interleave(16),
        "scales around underflow": normal(14) * torch.logspace(-7.5, -4.5, K // 16).repeat_interleave(16),
    }
    weights["scales around underflow"][0, 0] = 3.0  # scales are from 0 over e4m3's subnormals to its normals
    weights["zero groups"] = normal(15)
    weights["zero groups"][:, 64:96] = 0.0
    weights["zero groups"][3, 128:] = -0.0
    weights["single outlier"] = normal(16) * 1e-3
    weights["single outlier"][:, 5] = 3e4
    # global scale 2688 / 6 = 448 exactly, scale 448: quotients are quarters, which hold every tie of e2m1
    ties = torch.randint(-24, 25, (N, K), generator=torch.Generator().manual_seed(17)) / 4
    ties[:, ::16] = 6.0
    weights["ties"] = ties
    weights["ties of the scales"] = torch.randint(1, 15 * 16, (N, K)).float() / 32
    weights["ties of the scales"][0, 0] = 6.0
    return weights


ADVERSARIAL = _adversarial()
NVFP4 = _nvfp4()
