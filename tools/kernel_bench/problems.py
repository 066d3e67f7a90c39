"""One weight in one scheme with activations for it, and everything that multiplies the two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from qarl_formats.registry import make_scheme, scheme_class
from qarl_formats.scheme import Scheme
from qarl_formats.weight import quantize_weight
from qarl_kernels.activation import quantize_activation_fp8, quantize_activation_int8
from torch import Tensor

from kernel_bench.shapes import BLOCK

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Candidate:
    """A product that is ready to run. finish: what turns its result into (M, N) values, not timed."""

    call: Call
    finish: Callable[[Tensor], Tensor] = field(default=lambda result: result)


Maker = Callable[[int], Candidate]  # rows -> candidate; may raise what a peer raises


@dataclass
class Weight:
    """A Linear's weight as stored, and as float32 values.

    Args:
        scheme: one of `SCHEMES`.
        n, k: out_features, in_features.
        tensors: by compressed-tensors suffix; `weight` bf16 for dense.
        values: float32 (N, K), what the codes stand for.
        group: input features that share a scale, for int4.
    """

    scheme: str
    n: int
    k: int
    tensors: dict[str, Tensor]
    values: Tensor
    group: int | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for name, tensor in self.tensors.items() if name != "weight_shape")


@dataclass
class Activations:
    """x: (M, K) bf16 for the most rows; codes, scale: its quantized form or None; values: what the product reads."""

    x: Tensor
    codes: Tensor | None
    scale: Tensor | None

    def values(self, rows: Tensor) -> Tensor:
        """float32 values of these rows, as the kernels read them."""
        if self.codes is None or self.scale is None:
            return self.x[rows].float()
        codes = self.codes.view(torch.int8)[rows].view(self.codes.dtype).float()  # no indexing of float8 everywhere
        scale = self.scale[rows]
        if scale.shape[1] > 1:
            scale = scale.repeat_interleave(BLOCK, dim=1)[:, : codes.shape[1]]
        return codes * scale

    def row_bytes(self) -> int:
        read = [self.x] if self.codes is None or self.scale is None else [self.codes, self.scale]
        return sum(tensor.shape[1] * tensor.element_size() for tensor in read)


def qarl_scheme(name: str, group: int, symmetric: bool = True) -> Scheme:
    """The scheme of this name, with a group size where it has one."""
    return make_scheme(name, group if scheme_class(name).group_sizes else None, symmetric)


def make_weight(scheme: str, n: int, k: int, group: int, device: torch.device) -> Weight:
    """Random weights, quantized by the plain-torch functions."""
    master = torch.randn(n, k, device=device, generator=torch.Generator(device).manual_seed(n + k)).mul_(0.02)
    if scheme == "dense":
        stored = {"weight": master.to(torch.bfloat16)}
        return Weight(scheme, n, k, stored, stored["weight"].float())
    kind = qarl_scheme(scheme, group)
    quantized = quantize_weight(master, kind, scheme)
    # Where activations are not quantized, the operand is the value rounded to bf16.
    dtype = torch.bfloat16 if kind.activation is None else torch.float32
    values = quantized.dequantize(dtype).float()
    return Weight(scheme, n, k, quantized.tensors, values, kind.group_size)


def make_activations(scheme: str, m: int, k: int, device: torch.device) -> Activations:
    """Random activations for m rows, quantized as the scheme wants them by the plain-torch functions."""
    x = torch.randn(m, k, device=device, generator=torch.Generator(device).manual_seed(k)).to(torch.bfloat16)
    if scheme in ("w8a8", "w4a8"):
        return Activations(x, *quantize_activation_int8(x))
    if scheme == "fp8":
        return Activations(x, *quantize_activation_fp8(x))
    if scheme == "fp8_block":
        codes, scale = quantize_activation_fp8(x.view(m * k // BLOCK, BLOCK))
        return Activations(x, codes.view(m, k), scale.view(m, k // BLOCK))
    return Activations(x, None, None)


def qarl_makers(weight: Weight, activations: Activations) -> tuple[dict[str, Maker], dict[str, Maker]]:
    """qarl's kernels on this weight: (with quantized activations, from bf16 activations)."""
    from qarl_kernels import fp8_block, gemm, quantize, tile, w4a8, w4a16

    stored, x, codes, scale = weight.tensors, activations.x, activations.codes, activations.scale
    n, k, bf16 = weight.n, weight.k, torch.bfloat16
    if weight.scheme == "dense":
        return {"qarl": lambda m: Candidate(lambda: gemm.dense(x[:m], stored["weight"]))}, {}
    if weight.scheme == "w4a16":
        packed, s_w = stored["weight_packed"], stored["weight_scale"]
        tiled, meta = tile.tile_int4(packed, k), tile.meta_w4a16(s_w, None, n, k, weight.group, bf16)
        return {"qarl": lambda m: Candidate(lambda: w4a16.w4a16(x[:m], packed, s_w, None, tiled, meta, None))}, {}
    assert codes is not None and scale is not None, f"{weight.scheme} reads quantized activations"
    if weight.scheme == "w4a8":
        tiled = tile.tile_int4(stored["weight_packed"], k)
        meta = tile.meta_w4a8(stored["weight_scale"], n, k, weight.group)

        def product(qx: Tensor, s_x: Tensor) -> Tensor:
            return w4a8.w4a8(qx, s_x, tiled, meta, k, n, None, bf16)

        kind = "int8"
    else:
        run, kind = {
            "w8a8": (gemm.scaled, "int8"),
            "fp8": (gemm.scaled, "fp8"),
            "fp8_block": (fp8_block.fp8_block, "fp8_group"),
        }[weight.scheme]

        def product(qx: Tensor, s_x: Tensor) -> Tensor:
            return run(qx, s_x, stored["weight"], stored["weight_scale"], None, bf16)

    return (
        {"qarl": lambda m: Candidate(lambda: product(codes[:m], scale[:m]))},
        {"qarl": lambda m: Candidate(lambda: product(*quantize.activation_codes(x[:m], kind)))},
    )
