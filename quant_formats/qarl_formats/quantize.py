"""FP32 master weight -> codes and scales, bit for bit as compressed-tensors computes them, and back.

The oracle is `calculate_qparams` with `QuantizationArgs.scale_dtype` set to the stored dtype, followed by the
format's compressor, on the CPU (compressed-tensors 0.17). Its rules, which are ours:

- scale = absmax / (code range / 2): 7.5 for int4, 127.5 for int8, 448 for e4m3fn. So +absmax of an int4 group sits
  on 7.5, and rounds and clamps to 7, while -absmax becomes -8.
- The scale is clamped to the finite range of its stored dtype and rounded to it; a scale that is zero after that
  (zero group, or underflow) becomes the dtype's eps. Codes are round-half-even(weight / stored scale), in FP32.
- Asymmetric: scale = (max - min) / 15 over a range that includes 0; the zero point comes from the scale *before*
  it is rounded. The library's zero point of a zero group is an int8 cast of NaN; here it is 0, which is what that
  cast gives on x86.
- e4m3fn: adding the library's zero point of +0 turns a weight of -0.0 into code +0.

On CUDA the library's division by a Python number is a multiplication with the reciprocal, one FP32 ulp off at
times. Here it is a true division everywhere, so that a master gives the same codes on every device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qarl_formats.packing import pack_int4, pack_zero_points, unpack_int4, unpack_zero_points
from qarl_formats.scheme import Scheme, check_shape

_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


@dataclass
class QuantizedWeight:
    """The stored form of one Linear weight.

    Args:
        scheme: how it is stored.
        tensors: by compressed-tensors suffix. int4: `weight_packed` int32 [N, ceil(K/8)], `weight_scale`
            [N, groups], `weight_shape` int64 [2] (on the CPU), and if asymmetric `weight_zero_point` int32
            [ceil(N/8), groups]. Otherwise `weight` int8 or float8_e4m3fn [N, K] and `weight_scale` [N, 1].
        shape: (N, K) = (out_features, in_features).
    """

    scheme: Scheme
    tensors: dict[str, Tensor]
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def grid_of(scheme: Scheme) -> tuple[float, float, float]:
    """(lowest code, highest code, divisor of absmax) of a scheme."""
    if scheme.weight_type == "float":
        return -_FP8_MAX, _FP8_MAX, _FP8_MAX
    if scheme.grid == "symmetric7":
        return -7.0, 7.0, 7.0
    half_range = 2.0 ** (scheme.weight_bits - 1)
    return -half_range, half_range - 1, half_range - 0.5


def _stored_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a nonnegative FP32 scale to `dtype`, finite and nonzero."""
    limits = torch.finfo(dtype)
    stored = scale.clamp(max=limits.max).to(dtype)
    return stored.masked_fill_(stored == 0, limits.eps)


@torch.no_grad()
def quantize_weight(weight: Tensor, scheme: Scheme, name: str) -> QuantizedWeight:
    """Quantize one master weight.

    Args:
        weight: float32 [N, K] = [out_features, in_features]; not changed.
        scheme: a quantized scheme (not bf16).
        name: what errors call the tensor.

    Raises:
        ValueError: the scheme does not fit the shape, or a value is NaN or infinite.
    """
    assert scheme.quantized, f"{name}: scheme {scheme.name} does not quantize weights"
    assert weight.dtype == torch.float32 and weight.ndim == 2, f"{name}: need a float32 matrix, got {weight.dtype}"
    out_features, in_features = weight.shape
    check_shape(scheme, name, out_features, in_features)
    lowest, highest, divisor = grid_of(scheme)
    groups = weight.reshape(out_features, scheme.num_groups(in_features), -1)

    low = groups.amin(dim=-1, keepdim=True)
    high = groups.amax(dim=-1, keepdim=True)
    absmax = torch.maximum(high, -low)
    if not absmax.isfinite().all():
        bad = weight.isfinite().logical_not_().sum().item()
        raise ValueError(
            f"{name}: {bad} of {weight.numel()} values are NaN or infinite and cannot be quantized; "
            "go back to an earlier checkpoint or lower the learning rate"
        )

    scale_dtype = getattr(torch, scheme.scale_dtype)
    if scheme.symmetric:
        scale = _stored_scale(absmax / torch.full_like(absmax, divisor), scale_dtype)
        scaled = groups / scale.float()
    else:
        low.clamp_(max=0)
        exact = (high.clamp_(min=0) - low) / torch.full_like(low, highest - lowest)
        zero_point = (lowest - low / exact).clamp_(lowest, highest).nan_to_num_(nan=0.0).round_()
        scale = _stored_scale(exact, scale_dtype)
        scaled = (groups / scale.float()).add_(zero_point)

    if scheme.weight_type == "float":
        codes = scaled.add_(0.0).clamp_(lowest, highest).to(torch.float8_e4m3fn)
    else:
        codes = scaled.clamp_(lowest, highest).round_().to(torch.int8)
    codes = codes.view(out_features, in_features)

    tensors = {"weight_packed": pack_int4(codes)} if scheme.packed else {"weight": codes}
    tensors["weight_scale"] = scale.squeeze(-1)
    if not scheme.symmetric:
        tensors["weight_zero_point"] = pack_zero_points(zero_point.squeeze(-1).to(torch.int8))
    if scheme.packed:
        tensors["weight_shape"] = torch.tensor([out_features, in_features])
    return QuantizedWeight(scheme, tensors, (out_features, in_features))


def unpack_codes(quantized: QuantizedWeight) -> Tensor:
    """The codes as one element each: int8 [N, K], or float8_e4m3fn [N, K] for fp8 (the stored tensor itself)."""
    if quantized.scheme.packed:
        return unpack_int4(quantized.tensors["weight_packed"], quantized.shape[1])
    return quantized.tensors["weight"]


@torch.no_grad()
def dequantize_weight(quantized: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The weight that the codes stand for: (code - zero point) * scale in FP32, rounded once to `dtype`. [N, K]."""
    out_features, in_features = quantized.shape
    scale = quantized.tensors["weight_scale"]
    values = unpack_codes(quantized).to(torch.float32).view(out_features, scale.shape[1], -1)
    if not quantized.scheme.symmetric:
        zero_point = unpack_zero_points(quantized.tensors["weight_zero_point"], out_features)
        values.sub_(zero_point.unsqueeze(-1))
    return values.mul_(scale.float().unsqueeze(-1)).view(out_features, in_features).to(dtype)


def codes_changed(before: QuantizedWeight, after: QuantizedWeight) -> tuple[Tensor, int]:
    """Count the codes that differ between two versions of one weight; scales and zero points do not count.

    The fp8 codes +0 and -0 are different codes.

    Returns:
        (changed, total): counts of codes; changed a scalar int64 tensor on their device, total = N * K.

    Raises:
        ValueError: the two have different schemes or shapes.
    """
    if before.scheme != after.scheme or before.shape != after.shape:
        raise ValueError(
            f"codes of {before.scheme.name} {before.shape} and {after.scheme.name} {after.shape} cannot be compared"
        )
    key = "weight_packed" if before.scheme.packed else "weight"
    difference = before.tensors[key].view(torch.uint8) ^ after.tensors[key].view(torch.uint8)
    if before.scheme.packed:
        changed = (difference & 0x0F).count_nonzero() + (difference & 0xF0).count_nonzero()
    else:
        changed = difference.count_nonzero()
    return changed, before.shape[0] * before.shape[1]
