"""One weight in one scheme with activations for it, and everything that multiplies the two."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from kernel_bench.shapes import BLOCK
from qarl_formats.registry import make_scheme, scheme_class
from qarl_formats.scheme import Codes, Scheme
from qarl_formats.weight import LowBitWeight, quantize_weight
from qarl_kernels.activation import quantize_activation_fp8, quantize_activation_int8
from torch import Tensor

Call = Callable[[], Tensor]
Maker = Callable[[int], Call]  # rows -> a product that is ready to run; may raise what a peer raises


@dataclass
class Weight:
    """A Linear's weight as stored, and as float32 values.

    Attributes:
        scheme: One of `SCHEMES`.
        n, k: Output and input features.
        low_bit: The weight as the learner multiplies it.
        tensors: Stored tensors by compressed-tensors suffix; `weight` bf16 for dense.
        values: float32 (N, K), what the codes stand for.
        group: Input features that share a scale, for int4.
    """

    scheme: str
    n: int
    k: int
    low_bit: LowBitWeight
    values: Tensor
    group: int | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        return self.low_bit.tensors

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
        values = master.to(torch.bfloat16)
        return Weight(scheme, n, k, LowBitWeight.of_values(values), values.float())
    kind = qarl_scheme(scheme, group)
    quantized = quantize_weight(master, kind, scheme)
    # If activations are not quantized, the operand is the value rounded to bf16.
    dtype = torch.bfloat16 if kind.activation is None else torch.float32
    values = quantized.dequantize(dtype).float()
    return Weight(scheme, n, k, quantized, values, kind.group_size)


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


def qarl_maker(weight: Weight, activations: Activations) -> Maker:
    """qarl's kernel on this weight."""
    prepared = weight.low_bit.prepare(torch.bfloat16, kernels=True)
    x, codes, scale = activations.x, activations.codes, activations.scale
    if codes is None or scale is None:
        return lambda m: partial(prepared.matmul, x[:m])
    return lambda m: partial(prepared.matmul, Codes(codes[:m], scale[:m], torch.bfloat16))
