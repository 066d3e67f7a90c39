"""Masters that quantize to given codes and scales."""

import pytest
import torch
from qarl_formats import preimage, rounding
from qarl_formats.bits import same_bits
from qarl_formats.registry import make_scheme
from qarl_formats.scheme import SCALE_DTYPES
from torch import Tensor

N, K = 24, 256
SCHEMES = [
    *(make_scheme("w4a16", size, scale_dtype=dtype) for size in (32, -1) for dtype in SCALE_DTYPES),
    *(make_scheme("w4a16", size, False, scale_dtype=dtype) for size in (32, -1) for dtype in SCALE_DTYPES),
    make_scheme("w4a8", 64, grid="symmetric7"),
    make_scheme("w4a8", 128, grid="symmetric7", scale_dtype="float32"),
    *(make_scheme(name, scale_dtype=dtype) for name in ("w8a8", "fp8", "fp8_block") for dtype in SCALE_DTYPES),
    make_scheme("nvfp4a16"),
]


def _id(scheme):
    return f"{scheme.name}-{scheme.group_size}-{'sym' if scheme.symmetric else 'asym'}-{scheme.scale_dtype}"


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _masters() -> dict[str, Tensor]:
    normal = torch.randn(N, K, generator=_random(0))
    return {
        "normal": normal,
        "small": normal * 3e-3,
        "every size": normal * torch.logspace(-6, 2, K).sort(descending=True).values,
        "one sign": normal.abs() + 0.5,
        "other sign": -normal.abs() - 0.5,
        "zero": torch.zeros(N, K),
        "zero rows": normal.index_fill(0, torch.tensor([0, 7]), 0.0),
        "two values": normal.sign() * 0.37,
        "outlier": (normal * 1e-3).index_fill(1, torch.tensor([5]), 3.0),
        "few codes": torch.randint(-3, 4, (N, K), generator=_random(1)) * 0.011,
    }


MASTERS = _masters()


def same(scheme, a, b) -> bool:
    return all(same_bits(a[name], b[name]) for name in a)


@pytest.mark.parametrize("scheme", SCHEMES, ids=_id)
@pytest.mark.parametrize("case", MASTERS)
def test_stored_tensors_of_a_master_are_quantized_to_again(scheme, case):
    stored, _ = scheme.quantize(MASTERS[case])
    master, missing = scheme.preimage(stored, (N, K))
    assert (master.dtype, master.shape, int(missing)) == (torch.float32, (N, K), 0)
    again, bad = scheme.quantize(master)
    assert same(scheme, stored, again)
    assert not bad


@pytest.mark.parametrize("scheme", SCHEMES, ids=_id)
def test_only_the_ends_of_groups_differ_from_the_dequantized_values(scheme):
    stored, _ = scheme.quantize(MASTERS["normal"])
    master, _ = scheme.preimage(stored, (N, K))
    values = scheme.dequantize(stored, (N, K), torch.float32)
    # The ends of int4 and int8 are half a step outside of the codes. With floats, -0 becomes a tiny number.
    largest = stored["weight_scale"].float().max() / stored.get("weight_global_scale", 1)
    limit = {"int": 0.51, "float": 2.0**-11}[scheme.weight_type]
    assert ((master - values).abs() <= limit * largest).all()


def _random_codes(lowest: int, highest: int, groups: int = 3000, size: int = 32) -> Tensor:
    """Groups whose codes fill different ranges."""
    ends = torch.randint(lowest, highest + 1, (groups, 2), generator=_random(2)).sort(1).values[:, :, None]
    drawn = torch.rand(groups, size, generator=_random(3))
    return (ends[:, 0] + (drawn * (ends[:, 1] - ends[:, 0] + 1)).floor()).clamp(lowest, highest)


def _random_scales(groups: int, dtype: str) -> Tensor:
    return (torch.rand(groups, 1, generator=_random(4)) * 0.01 + 1e-4).to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("grid", "ends"), [("INT4", (-7, 7)), ("INT4_SYMMETRIC7", (-7, 7)), ("INT8", (-127, 127))])
def test_a_symmetric_group_has_a_master_if_a_code_is_at_the_end(grid, ends, dtype):
    made = getattr(rounding, grid)
    codes = _random_codes(int(made.lowest), int(made.highest))
    codes[:, :2] = torch.where(torch.arange(3000)[:, None] % 3 == 0, torch.tensor(ends), codes[:, :2])
    scale = _random_scales(len(codes), dtype)
    master, exact = preimage.symmetric(codes, scale, made)
    assert torch.equal(exact, ((codes <= ends[0]) | (codes >= ends[1])).any(1))
    assert 1000 < exact.sum() < 3000
    assert torch.equal(master[~exact], (codes * scale.float())[~exact]), "they keep the dequantized values"
    scaled, found, _ = rounding.symmetric(master, made, scale.dtype)
    assert torch.equal(((scaled.clamp(made.lowest, made.highest).round() == codes) & (found == scale)).all(1), exact)


def test_weights_with_one_global_scale_are_quantized_together():
    scheme = make_scheme("nvfp4a16")
    weights = [MASTERS["normal"], MASTERS["normal"].roll(1, 0) * 0.3]
    shared = scheme.shared(weights)
    stored = [scheme.quantize(weight, shared=shared)[0] for weight in weights]
    masters = [scheme.preimage(tensors, (N, K))[0] for tensors in stored]
    assert torch.equal(scheme.shared(masters), shared)
    for master, tensors in zip(masters, stored, strict=True):
        assert same(scheme, scheme.quantize(master, shared=shared)[0], tensors)
