"""Random operands of the product kernels, and the product of every family, to compare with float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from nvfp4_products import Nvfp4
from qarl_kernels import fp8_block, gemm, nvfp4a16, reference, tile, w4a8, w4a16
from qarl_kernels import quantize as kernels
from qarl_kernels.activation import quantize_activation_fp8, quantize_activation_int8
from torch import Tensor


def random(*shape: int, seed: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def integers(low: int, high: int, *shape: int, seed: int, device: torch.device) -> Tensor:
    """Return random int8 values in [low, high]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator, dtype=torch.int8).to(device)


def of_both_dtypes(shapes: list[tuple[int, int]]) -> list[tuple[int, int, torch.dtype]]:
    """Return all shapes in bf16, and every second one also in fp16, where only conversions differ."""
    return [(*shape, torch.bfloat16) for shape in shapes] + [(*shape, torch.float16) for shape in shapes[::2]]


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Return the relative Frobenius norm of the difference from `expected`; NaN if the result contains NaN."""
    return ((result.double() - expected.double()).norm() / expected.double().norm()).item()


@dataclass
class Int4:
    """An int4 weight (N, K): codes and zero points int8, scales of `dtype`; the stored and the tiled form of it."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    group: int | None

    @classmethod
    def random(
        cls,
        n: int,
        k: int,
        group: int | None,
        *,
        asymmetric: bool = False,
        seed: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device,
    ) -> Int4:
        groups = 1 if group is None else k // group
        codes = integers(-8, 7, n, k, seed=seed, device=device)
        scale = torch.rand(n, groups, generator=torch.Generator().manual_seed(seed + 1)).to(device) * 0.02 + 0.001
        zero_point = integers(-8, 7, n, groups, seed=seed + 2, device=device) if asymmetric else None
        return cls(codes, scale.to(dtype), zero_point, group)

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def values(self, dtype: torch.dtype) -> Tensor:
        """(code - zero) * scale in float32, rounded once."""
        repeat = self.group or self.shape[1]
        zero = 0 if self.zero_point is None else self.zero_point.float().repeat_interleave(repeat, dim=1)
        return ((self.codes.float() - zero) * self.scale.float().repeat_interleave(repeat, dim=1)).to(dtype)

    def packed(self) -> Tensor:
        return _pack(self.codes)

    def packed_zero_point(self) -> Tensor | None:
        return None if self.zero_point is None else _pack(self.zero_point.t()).t().contiguous()

    def tiled(self) -> Tensor:
        return tile.tile_int4(self.packed(), self.shape[1])

    def meta(self, dtype: torch.dtype) -> Tensor:
        return tile.meta_w4a16(self.scale, self.packed_zero_point(), *self.shape, self.group, dtype)

    def meta_int8(self) -> Tensor:
        return tile.meta_w4a8(self.scale, *self.shape, self.group)


def _pack(codes: Tensor) -> Tensor:
    """int8 (R, C) in [-8, 7] -> int32 (R, ceil(C / 8)): code + 8, the first in the lowest bits, missing ones zero."""
    nibbles = torch.nn.functional.pad(codes.int() + 8, (0, -codes.shape[1] % 8)).view(codes.shape[0], -1, 8)
    words = torch.zeros(nibbles.shape[:2], dtype=torch.int32, device=codes.device)
    for j in range(8):
        words |= nibbles[:, :, j] << (4 * j)
    return words


BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
FAST = 5e-3  # FP8 on Hopper accumulates 14 bits of a sum


def activation_codes(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return codes of activations: by the kernel on a GPU, by plain torch on a CPU."""
    if x.is_cuda:
        return kernels.activation_codes(x, kind)
    rule = quantize_activation_int8 if kind == "int8" else quantize_activation_fp8
    parts = [rule(part) for part in (x.split(128, 1) if kind == "fp8_group" else [x])]
    return torch.cat([codes for codes, _ in parts], 1), torch.cat([scale for _, scale in parts], 1)


@dataclass
class Weights:
    """Weights of all experts.

    product: Of (x, expert, bias, out_dtype, **grouped), with one expert's weight; expert None: with all.
    exact: Of (x, expert), in float64. bits: Of (x, bias), what plain torch gives with one expert, if exactly that.
    """

    product: Callable[..., Tensor]
    exact: Callable[[Tensor, int], Tensor]
    error: float = 2**-20  # of float32 sums
    bits: Callable[[Tensor, Tensor], Tensor] | None = None


def dense(n: int, k: int, dtype: torch.dtype, device: torch.device, experts: int) -> Weights:
    weight = random(experts * n, k, seed=2, device=device, dtype=dtype)
    own = weight.chunk(experts)
    return Weights(
        lambda x, e, bias=None, out=None, **more: gemm.dense(x, weight if e is None else own[e], bias, out, **more),
        lambda x, e: x.double() @ own[e].double().t(),
    )


def scaled(n: int, k: int, dtype: torch.dtype, device: torch.device, experts: int, int8: bool) -> Weights:
    quantize = partial(activation_codes, kind="int8" if int8 else "fp8")
    codes = integers(-128, 127, experts * n, k, seed=2, device=device)
    codes = codes if int8 else random(experts * n, k, seed=2, device=device).to(E4M3)
    scale = (torch.rand(experts * n, 1, generator=torch.Generator().manual_seed(3)) * 0.01).to(device, BF16)
    own = list(zip(codes.chunk(experts), scale.chunk(experts), strict=True))

    def product(x: Tensor, e: int | None, bias: Tensor | None = None, out: torch.dtype = dtype, **more) -> Tensor:
        return gemm.scaled(*quantize(x), *((codes, scale) if e is None else own[e]), bias, out, **more)

    def exact(x: Tensor, e: int) -> Tensor:
        qx, s_x = quantize(x)
        return qx.double() @ own[e][0].double().t() * own[e][1].double().t() * s_x.double()

    bits = (lambda x, bias: reference.w8a8(x, codes.float(), scale, bias)) if int8 else None
    return Weights(product, exact, 2**-20 if int8 else FAST, bits)


def blocks(n: int, k: int, dtype: torch.dtype, device: torch.device, experts: int) -> Weights:
    codes = random(experts * n, k, seed=2, device=device).to(E4M3)
    scale = random(-(-experts * n // 128), -(-k // 128), seed=4, device=device).to(BF16)
    own = list(zip(codes.chunk(experts), scale.chunk(experts), strict=True))

    quantize = partial(activation_codes, kind="fp8_group")

    def product(x: Tensor, e: int | None, bias: Tensor | None = None, out: torch.dtype = dtype, **more) -> Tensor:
        return fp8_block.fp8_block(*quantize(x), *((codes, scale) if e is None else own[e]), bias, out, **more)

    def exact(x: Tensor, e: int) -> Tensor:
        (qx, s_x), (mine, s_w) = quantize(x), own[e]
        wide = s_w.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        return (qx.double() * s_x.double().repeat_interleave(128, 1)[:, :k]) @ (mine.double() * wide).t()

    return Weights(product, exact, FAST)


def _one(weight: Int4, expert: int | None, experts: int) -> Int4:
    """Return one expert's weight; None: that of all experts."""
    if expert is None:
        return weight
    parts = (None if one is None else one.chunk(experts)[expert] for one in (weight.codes, weight.scale))
    return Int4(*parts, weight.zero_point if experts == 1 else None, weight.group)


def int4(
    n: int, k: int, dtype: torch.dtype, device: torch.device, experts: int, group: int | None = 32, asymmetric=False
) -> Weights:
    weight = Int4.random(experts * n, k, group, asymmetric=asymmetric, dtype=dtype, device=device)

    def product(x: Tensor, e: int | None, *given, **more) -> Tensor:
        own = _one(weight, e, experts)
        form = own.scale, own.packed_zero_point(), own.tiled(), own.meta(dtype)
        return w4a16.w4a16(x, None, *form, *given, **more)

    return Weights(product, lambda x, e: x.double() @ _one(weight, e, experts).values(dtype).double().t())


def int4_int8(
    n: int, k: int, dtype: torch.dtype, device: torch.device, experts: int, group: int | None = 64
) -> Weights:
    weight = Int4.random(experts * n, k, group, device=device)

    def product(x: Tensor, e: int | None, bias: Tensor | None = None, out: torch.dtype = dtype, **more) -> Tensor:
        own = _one(weight, e, experts)
        form = own.tiled(), own.meta_int8(), k, n
        return w4a8.w4a8(*activation_codes(x, "int8"), *form, bias, out, group is None, **more)

    def exact(x: Tensor, e: int) -> Tensor:
        qx, s_x = activation_codes(x, "int8")
        return qx.double() @ _one(weight, e, experts).values(torch.float32).double().t() * s_x.double()

    bits = lambda x, bias: reference.w4a8(x, weight.codes.float(), weight.scale, bias)  # noqa: E731
    return Weights(product, exact, bits=bits)


def nvfp4(n: int, k: int, dtype: torch.dtype, device: torch.device, experts: int) -> Weights:
    weight = Nvfp4.random(experts * n, k, device=device)

    def product(x: Tensor, e: int | None, *given, **more) -> Tensor:
        stored = weight.packed, weight.scale
        own = stored if e is None else tuple(part.chunk(experts)[e] for part in stored)
        return nvfp4a16.nvfp4a16(x, None, own[1], weight.global_scale, *nvfp4a16.tile_nvfp4(*own), *given, **more)

    def exact(x: Tensor, e: int) -> Tensor:
        return x.double() @ weight.scaled_codes().chunk(experts)[e].double().t() / weight.global_scale.double()

    return Weights(product, exact)


MAKE: dict[str, Callable[..., Weights]] = {
    "dense": dense,
    "w8a8": lambda *shape: scaled(*shape, int8=True),
    "fp8": lambda *shape: scaled(*shape, int8=False),
    "fp8_block": blocks,
    "w4a16": int4,
    "w4a8": int4_int8,
    "w4a8 channel": lambda *shape: int4_int8(*shape, group=None),
    "nvfp4a16": nvfp4,
}
