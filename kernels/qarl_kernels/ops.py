"""The low-bit products as torch operators in the namespace `qarl`, for autograd and torch.compile.

On the CPU an operator is the plain-torch reference, on CUDA the Triton kernels (which Triton, and so this import,
need only there). The weight's codes come as stored; activations are quantized inside.

Backward, straight through the rounding (QaRL section 3.1): `master` and `bias_master` are the FP32 masters, which the
forward does not read and which receive the gradient, so that a layer needs no autograd of its own:

    dx = dy @ W_deq,  d master = dy^T @ x in FP32,  d bias_master = sum of dy in FP32

None goes to the stored weight (for `dense` too: give a master). A bias gets its gradient where no bias_master does.

A float32 x runs on the reference everywhere. Kernels take 16-bit activations, and so does row invariance on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.library import CustomOpDef, custom_op

from qarl_kernels import reference, unpack
from qarl_kernels.backward import input_grad, weight_grad

_STRAIGHT_THROUGH = "Tensor? bias=None, Tensor? master=None, Tensor? bias_master=None) -> Tensor"


def _check(x: Tensor, in_features: int) -> None:
    if x.ndim != 2 or x.shape[1] != in_features:
        raise ValueError(f"x is {list(x.shape)}, but the weight takes (rows, {in_features}); reshape x")


def _check_int4(x: Tensor, packed: Tensor, scale: Tensor) -> None:
    if x.ndim != 2 or -(-x.shape[1] // 8) != packed.shape[1] or x.shape[1] % scale.shape[1]:
        raise ValueError(
            f"x is {list(x.shape)}, which does not fit packed {list(packed.shape)} and scale "
            f"{list(scale.shape)}; give x as (rows, in_features)"
        )


# --- dequantization: the backward's, opaque so that torch.compile can trace it -----------------------------------


@custom_op(
    "qarl::dequantize_int4",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor packed, Tensor scale, Tensor? zero_point, SymInt in_features, ScalarType dtype) -> Tensor",
)
def dequantize_int4(
    packed: Tensor, scale: Tensor, zero_point: Tensor | None, in_features: int, dtype: torch.dtype
) -> Tensor:
    """See `qarl_kernels.unpack.dequantized_int4`."""
    return unpack.dequantized_int4(packed, scale, zero_point, in_features, dtype)


@dequantize_int4.register_kernel("cuda")
def _(packed, scale, zero_point, in_features, dtype):
    from qarl_kernels import dequantize

    return dequantize.dequantize_int4(packed, scale, zero_point, in_features, dtype)


@dequantize_int4.register_fake
def _(packed, scale, zero_point, in_features, dtype):
    return scale.new_empty(packed.shape[0], in_features, dtype=dtype)


@custom_op(
    "qarl::dequantize_channel",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor codes, Tensor scale, ScalarType dtype) -> Tensor",
)
def dequantize_channel(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """See `qarl_kernels.unpack.dequantized_channel`."""
    return unpack.dequantized_channel(codes, scale, dtype)


@dequantize_channel.register_kernel("cuda")
def _(codes, scale, dtype):
    from qarl_kernels import dequantize

    return dequantize.dequantize_channel(codes, scale, dtype)


@custom_op(
    "qarl::dequantize_fp8_block",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor codes, Tensor scale, ScalarType dtype) -> Tensor",
)
def dequantize_fp8_block(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """See `qarl_kernels.unpack.dequantized_fp8_block`."""
    return unpack.dequantized_fp8_block(codes, scale, dtype)


@dequantize_fp8_block.register_kernel("cuda")
def _(codes, scale, dtype):
    from qarl_kernels import dequantize

    return dequantize.dequantize_fp8_block(codes, scale, dtype)


@dequantize_channel.register_fake
@dequantize_fp8_block.register_fake
def _(codes, scale, dtype):
    return scale.new_empty(codes.shape, dtype=dtype)


# --- products ----------------------------------------------------------------------------------------------------


@custom_op("qarl::dense", mutates_args=(), device_types="cpu", schema=f"(Tensor x, Tensor weight, {_STRAIGHT_THROUGH}")
def dense(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    master: Tensor | None = None,
    bias_master: Tensor | None = None,
) -> Tensor:
    """y = x @ weight^T + bias, a row's bits independent of the other rows.

    x: (M, K) bf16/fp16/fp32; weight: (N, K) and bias: (N,) of x's dtype; master: (N, K), bias_master: (N,) float32.
    Returns (M, N) of x's dtype. Raises ValueError where x and weight do not fit.
    """
    _check(x, weight.shape[1])
    return reference.dense(x, weight.float() if x.device.type == "cpu" else weight, bias)


@dense.register_kernel("cuda")
def _(x, weight, bias=None, master=None, bias_master=None):
    _check(x, weight.shape[1])
    if x.dtype == torch.float32:
        return reference.dense(x, weight, bias)
    from qarl_kernels import gemm

    return gemm.dense(x.contiguous(), weight, bias)


@custom_op(
    "qarl::w4a16",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point=None, Tensor? tiled=None, "
    f"Tensor? meta=None, {_STRAIGHT_THROUGH}",
)
def w4a16(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    tiled: Tensor | None = None,
    meta: Tensor | None = None,
    bias: Tensor | None = None,
    master: Tensor | None = None,
    bias_master: Tensor | None = None,
) -> Tensor:
    """y = x @ W^T + bias, W = (codes - zero point) * scale rounded to x's dtype.

    x: (M, K) bf16/fp16/fp32; packed: int32 (N, ceil(K / 8)); scale: (N, groups); zero_point: int32 (ceil(N / 8),
    groups) or None; tiled, meta: the same weight from `qarl_kernels.tile` (`meta_w4a16`), which CUDA multiplies at
    once, or None (dequantized first; the CPU reads neither). Returns (M, N) of x's dtype.
    """
    _check_int4(x, packed, scale)
    weight = unpack.dequantized_int4(packed, scale, zero_point, x.shape[1], x.dtype)
    return reference.dense(x, weight.float() if x.device.type == "cpu" else weight, bias)


@w4a16.register_kernel("cuda")
def _(x, packed, scale, zero_point=None, tiled=None, meta=None, bias=None, master=None, bias_master=None):
    _check_int4(x, packed, scale)
    if x.dtype == torch.float32:
        weight = unpack.dequantized_int4(packed, scale, zero_point, x.shape[1], x.dtype)
        return reference.dense(x, weight, bias)
    from qarl_kernels import w4a16 as kernel

    return kernel.w4a16(x.contiguous(), packed, scale, zero_point, tiled, meta, bias)


@custom_op(
    "qarl::w8a8",
    mutates_args=(),
    device_types="cpu",
    schema=f"(Tensor x, Tensor codes, Tensor scale, {_STRAIGHT_THROUGH}",
)
def w8a8(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    master: Tensor | None = None,
    bias_master: Tensor | None = None,
) -> Tensor:
    """`reference.w8a8` on stored codes: int8 (N, K), scale (N, 1). x: (M, K), quantized per token. Returns (M, N)."""
    _check(x, codes.shape[1])
    return reference.w8a8(x, codes.float(), scale, bias)


@w8a8.register_kernel("cuda")
def _(x, codes, scale, bias=None, master=None, bias_master=None):
    _check(x, codes.shape[1])
    if x.dtype == torch.float32:
        return reference.w8a8(x, codes.float(), scale, bias)
    from qarl_kernels import gemm, quantize

    return gemm.w8a8(*quantize.activation_int8(x.contiguous()), codes, scale, bias, x.dtype)


@custom_op(
    "qarl::fp8",
    mutates_args=(),
    device_types="cpu",
    schema=f"(Tensor x, Tensor codes, Tensor scale, {_STRAIGHT_THROUGH}",
)
def fp8(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    master: Tensor | None = None,
    bias_master: Tensor | None = None,
) -> Tensor:
    """`reference.fp8` on stored codes: float8_e4m3fn (N, K), scale (N, 1). x: (M, K), quantized per token."""
    _check(x, codes.shape[1])
    return reference.fp8(x, codes.float(), scale, bias)


@fp8.register_kernel("cuda")
def _(x, codes, scale, bias=None, master=None, bias_master=None):
    _check(x, codes.shape[1])
    if x.dtype == torch.float32:
        return reference.fp8(x, codes.float(), scale, bias)
    from qarl_kernels import gemm, quantize

    return gemm.fp8(*quantize.activation_fp8(x.contiguous()), codes, scale, bias, x.dtype)


@custom_op(
    "qarl::fp8_block",
    mutates_args=(),
    device_types="cpu",
    schema=f"(Tensor x, Tensor codes, Tensor scale, {_STRAIGHT_THROUGH}",
)
def fp8_block(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    master: Tensor | None = None,
    bias_master: Tensor | None = None,
) -> Tensor:
    """`reference.fp8_block` on stored codes: float8_e4m3fn (N, K), scale (ceil(N / 128), ceil(K / 128)).

    x: (M, K), quantized per token and 128 features. Returns (M, N) of x's dtype.
    """
    _check(x, codes.shape[1])
    return reference.fp8_block(x, codes.float(), scale, bias)


@fp8_block.register_kernel("cuda")
def _(x, codes, scale, bias=None, master=None, bias_master=None):
    _check(x, codes.shape[1])
    if x.dtype == torch.float32:
        return reference.fp8_block(x, codes.float(), scale, bias)
    from qarl_kernels import fp8_block as kernel
    from qarl_kernels import quantize

    return kernel.fp8_block(*quantize.activation_fp8_group(x.contiguous()), codes, scale, bias, x.dtype)


@custom_op(
    "qarl::w4a8",
    mutates_args=(),
    device_types="cpu",
    schema=f"(Tensor x, Tensor packed, Tensor scale, Tensor? tiled=None, Tensor? meta=None, {_STRAIGHT_THROUGH}",
)
def w4a8(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    tiled: Tensor | None = None,
    meta: Tensor | None = None,
    bias: Tensor | None = None,
    master: Tensor | None = None,
    bias_master: Tensor | None = None,
) -> Tensor:
    """`reference.w4a8` on stored codes: packed int32 (N, ceil(K / 8)), scale (N, groups). x: (M, K), per token.

    tiled, meta: the same weight from `qarl_kernels.tile` (`meta_w4a8`), which CUDA multiplies; where they are None it
    makes them first, in every call. The CPU reads neither. Returns (M, N) of x's dtype.
    """
    _check_int4(x, packed, scale)
    return reference.w4a8(x, unpack.int4_codes(packed, x.shape[1]).float(), scale, bias)


@w4a8.register_kernel("cuda")
def _(x, packed, scale, tiled=None, meta=None, bias=None, master=None, bias_master=None):
    _check_int4(x, packed, scale)
    (n, groups), k = scale.shape, x.shape[1]
    if x.dtype == torch.float32:
        return reference.w4a8(x, unpack.int4_codes(packed, k).float(), scale, bias)
    from qarl_kernels import quantize, tile
    from qarl_kernels import w4a8 as kernel

    if tiled is None or meta is None:
        group = None if groups == 1 else k // groups
        tiled, meta = tile.tile_int4(packed, k), tile.meta_w4a8(scale, n, k, group)
    return kernel.w4a8(*quantize.activation_int8(x.contiguous()), tiled, meta, k, n, bias, x.dtype, groups == 1)


@dense.register_fake
@w4a16.register_fake
@w8a8.register_fake
@fp8.register_fake
@fp8_block.register_fake
@w4a8.register_fake
def _(x, weight, *rest):
    return x.new_empty(x.shape[0], weight.shape[0])


# --- autograd ----------------------------------------------------------------------------------------------------


def _straight_through(op: CustomOpDef, operands: int, dequantized: Callable[..., Tensor]) -> None:
    """Register the backward of `op`, whose last arguments are bias, master and bias_master.

    operands: how many arguments after x `dequantized(*operands, in_features, dtype)` reads.
    """

    def setup_context(ctx, inputs, output) -> None:
        bias = inputs[-3]
        ctx.arguments, ctx.in_features = len(inputs), inputs[0].shape[1]
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(*inputs[: 1 + operands])

    def backward(ctx, dy: Tensor):
        x, *stored = ctx.saved_tensors
        # The dispatcher drops trailing arguments that have their defaults.
        needs = ctx.needs_input_grad + (False,) * (ctx.arguments - len(ctx.needs_input_grad))
        gradients: list[Tensor | None] = [None] * ctx.arguments
        if needs[0]:
            gradients[0] = input_grad(dy, dequantized(*stored, ctx.in_features, dy.dtype))
        if needs[-2]:
            gradients[-2] = weight_grad(dy, x)
        if needs[-1]:
            gradients[-1] = dy.float().sum(0)
        elif needs[-3]:
            gradients[-3] = dy.float().sum(0).to(ctx.bias_dtype)
        return tuple(gradients[: len(ctx.needs_input_grad)])

    op.register_autograd(backward, setup_context=setup_context)


_straight_through(dense, 1, lambda weight, _, dtype: weight.to(dtype))
_straight_through(w4a16, 3, dequantize_int4)
_straight_through(w8a8, 2, lambda codes, scale, _, dtype: dequantize_channel(codes, scale, dtype))
_straight_through(fp8, 2, lambda codes, scale, _, dtype: dequantize_channel(codes, scale, dtype))
_straight_through(fp8_block, 2, lambda codes, scale, _, dtype: dequantize_fp8_block(codes, scale, dtype))
_straight_through(w4a8, 2, lambda packed, scale, k, dtype: dequantize_int4(packed, scale, None, k, dtype))
