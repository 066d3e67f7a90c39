"""Per-token activation quantization against scalar transcriptions of vLLM's kernels."""

import numpy as np
import pytest
import torch
from kernel_harness import assert_rows_are_their_own
from qarl_kernels.activation import quantize_activation_fp8, quantize_activation_int8

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _rows(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 96, generator=generator) * torch.logspace(-6, 4, 512)[:, None]
    x[3] = 0.0
    x[4] = -0.0
    x[5] = 1e-3 * x[5].sign()
    x[6, 1:] = 0.0
    x[7] = torch.arange(-48, 48) / 2  # ties once the scale is a power of two
    x[7, 0] = 63.5
    return x.to(dtype)


def _vllm_int8(row: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """dynamic_scaled_int8_quant_kernel for one row, each operation rounded to float32."""
    absmax = np.float32(np.abs(row).max())
    inverse = np.float32(0) if absmax == 0 else np.float32(127) / absmax
    return np.clip(np.rint(row * inverse), -128, 127).astype(np.int8), absmax / np.float32(127)


def _vllm_fp8(row: np.ndarray) -> tuple[torch.Tensor, np.float32]:
    """dynamic_per_token_scaled_fp8_quant_kernel for one row; the cast to e4m3fn searched among all its values."""
    scale = max(np.float32(np.abs(row).max()) / np.float32(448), np.float32(1) / np.float32(448 * 512))
    x = np.clip(row / scale, np.float32(-448), np.float32(448)).astype(np.float64)
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()  # 0 .. 448, ascending
    # Nearest magnitude; of two equally near ones the even mantissa, which is the even index.
    distance = np.abs(np.abs(x)[:, None] - grid)
    nearest = distance.argmin(axis=1)
    upper = np.minimum(nearest + 1, 126)
    tie = (distance[np.arange(len(x)), nearest] == distance[np.arange(len(x)), upper]) & (upper != nearest)
    code = np.where(tie & (nearest % 2 == 1), upper, nearest).astype(np.uint8)
    return torch.from_numpy(code | (np.signbit(x).astype(np.uint8) << 7)), scale


QUANTIZERS = [quantize_activation_int8, quantize_activation_fp8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("quantize", "rule"), [*zip(QUANTIZERS, [_vllm_int8, _vllm_fp8], strict=True)])
def test_every_row_of_any_batch_is_quantized_by_vllms_rule(quantize, rule, dtype):
    x, before = _rows(dtype), _rows(dtype)
    codes, scale = quantize(x)
    expected = [rule(row) for row in x.float().numpy()]
    bytes_ = torch.stack([torch.as_tensor(row).view(torch.uint8) for row, _ in expected])
    assert torch.equal(codes.view(torch.uint8), bytes_) and torch.equal(x, before)
    assert torch.equal(scale[:, 0], torch.tensor(np.array([value for _, value in expected])))
    assert_rows_are_their_own(quantize, x)
    folded, its_scale = quantize(x.view(2, -1, 96))
    assert torch.equal(folded.view(torch.uint8), bytes_.view(2, 256, 96))
    assert torch.equal(its_scale, scale.view(2, 256, 1))


def test_int8_multiplier_stays_finite_below_the_range_of_its_reciprocal():
    codes, _ = quantize_activation_int8(torch.tensor([[1e-38, -1e-38, 0.0]]))
    assert codes.tolist() == [[3, -3, 0]]  # 1e-38 * 3.4e38, where 127 / 1e-38 would be infinite


@pytest.mark.parametrize("quantize", QUANTIZERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nonfinite_row_shows_in_its_scale_and_in_no_other(quantize, value):
    x = torch.ones(3, 16)
    x[1, 5] = value
    _, scale = quantize(x)
    assert scale.isfinite().flatten().tolist() == [True, False, True]
