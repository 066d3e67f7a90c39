"""Kernels that quantize weights against the plain-torch functions, bit for bit; those have the library as oracle."""

import pytest
import torch
from hard_weights import ADVERSARIAL
from kernel_harness import NEEDS_TRITON, QUIET, assert_same
from pairwise import pairwise
from qarl_formats.registry import make_scheme
from qarl_formats.weight import quantize_weight
from qarl_kernels.quantize import quantize_bytes, quantize_int4

pytestmark = [NEEDS_TRITON, QUIET, pytest.mark.usefixtures("poisoned")]

SCALE_DTYPES = [torch.bfloat16, torch.float16, torch.float32]
DTYPE_NAMES = ["bfloat16", "float16", "float32"]
BYTES = {"w8a8": torch.int8, "fp8": torch.float8_e4m3fn, "fp8_block": torch.float8_e4m3fn}


def _adversarial(k: int) -> torch.Tensor:
    """One row a difficulty."""
    return torch.stack([weight[7, :k] for weight in ADVERSARIAL.values()])


def _int4(weight, scheme):
    divisor, lowest = (7.0, -7) if scheme.grid == "symmetric7" else (7.5, -8)
    return quantize_int4(
        weight,
        scheme.group_size,
        symmetric=scheme.symmetric,
        divisor=divisor,
        lowest=lowest,
        highest=7,
        scale_dtype=getattr(torch, scheme.scale_dtype),
    )


def _assert_int4_is_the_reference(weight, scheme, device):
    expected = quantize_weight(weight.cpu(), scheme, "w").tensors
    packed, scale, zero_point, bad = _int4(weight.to(device), scheme)
    assert_same(packed, expected["weight_packed"])
    assert_same(scale, expected["weight_scale"])
    assert (zero_point is None) == scheme.symmetric
    if zero_point is not None:
        assert_same(zero_point, expected["weight_zero_point"])
    assert bad.shape == () and bad.dtype == torch.int32 and bad.item() == 0


@pytest.mark.parametrize(("group", "symmetric", "scale_dtype"), pairwise([32, 64, 128, -1], [True, False], DTYPE_NAMES))
def test_int4_equals_the_reference(group, symmetric, scale_dtype, device):
    weight = _adversarial(100 if group == -1 else 256)
    _assert_int4_is_the_reference(weight, make_scheme("w4a16", group, symmetric, scale_dtype=scale_dtype), device)
    if symmetric and scale_dtype == "float16":
        scheme = make_scheme("w4a16", group, grid="symmetric7", scale_dtype="float16")
        _assert_int4_is_the_reference(weight, scheme, device)


def _rows_apart(n: int, k: int, device: torch.device) -> torch.Tensor:
    """Random (n, k), whose rows have NaN between them."""
    storage = torch.full((n, k + 3), torch.nan, device=device)
    storage[:, :k] = torch.randn(n, k, generator=torch.Generator().manual_seed(n * k)) * 0.05
    return storage[:, :k]


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize(("n", "k", "group"), [(1, 32, 32), (37, 96, 32), (3, 4224, 128), (9, 1, -1), (3, 1030, -1)])
def test_int4_of_ragged_shapes(n, k, group, symmetric, device):
    _assert_int4_is_the_reference(_rows_apart(n, k, device), make_scheme("w4a16", group, symmetric), device)


def _assert_bytes_are_the_reference(weight, name, scale_dtype, device):
    expected = quantize_weight(weight.cpu(), make_scheme(name, scale_dtype=str(scale_dtype)[6:]), "w").tensors
    codes, scale, bad = quantize_bytes(weight.to(device), scale_dtype, BYTES[name], name == "fp8_block")
    assert_same(codes, expected["weight"])
    assert_same(scale, expected["weight_scale"])
    assert bad.item() == 0


@pytest.mark.parametrize(("name", "k", "scale_dtype"), pairwise(("w8a8", "fp8"), [100, 128], SCALE_DTYPES))
def test_channel_equals_the_reference(name, k, scale_dtype, device):
    _assert_bytes_are_the_reference(_adversarial(k), name, scale_dtype, device)


@pytest.mark.parametrize("name", ["w8a8", "fp8"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 13), (2, 5000)])
def test_channel_of_ragged_shapes(name, n, k, device):
    _assert_bytes_are_the_reference(_rows_apart(n, k, device), name, torch.bfloat16, device)


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
@pytest.mark.parametrize(("n", "k"), [(22, 100), (256, 128), (130, 250)])
def test_fp8_block_equals_the_reference(n, k, scale_dtype, device):
    weight = _adversarial(k).repeat(n // 16 + 1, 1)[:n]
    weight[:128] *= 1e-3
    if n == 256:
        weight[128:] = -0.0
    _assert_bytes_are_the_reference(weight, "fp8_block", scale_dtype, device)


QUANTIZERS = {
    "int4": lambda weight: _int4(weight, make_scheme("w4a16", 32)),
    "int4 asymmetric": lambda weight: _int4(weight, make_scheme("w4a16", 32, False)),
    "int4 channel": lambda weight: _int4(weight, make_scheme("w4a16", -1)),
    "int8": lambda weight: quantize_bytes(weight, torch.bfloat16, torch.int8),
    "fp8": lambda weight: quantize_bytes(weight, torch.bfloat16, torch.float8_e4m3fn),
    "fp8 block": lambda weight: quantize_bytes(weight, torch.bfloat16, torch.float8_e4m3fn, True),
}


@pytest.mark.parametrize("name", QUANTIZERS)
def test_bad_counts_nan_and_infinity(name, device):
    weight = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    weight[0, :3] = float("nan")
    weight[1, 31], weight[1, 32] = float("inf"), float("-inf")
    weight[4] = float("nan")
    weight[2, 7] = torch.finfo(torch.float32).max  # still finite
    on_device = weight.to(device, copy=True)
    assert QUANTIZERS[name](on_device)[-1].item() == 3 + 2 + 96
    assert_same(on_device, weight)  # the master is left as it was
