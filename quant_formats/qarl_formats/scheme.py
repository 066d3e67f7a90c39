"""The interface of a quantization scheme. Imports no torch, so that a configuration can be checked without it.

A scheme is one class in `qarl_formats.schemes`, registered by name in `qarl_formats.registry`:

    properties and options         class attributes
    on disk                        tensor_specs, weight_arguments, activation_arguments, file_format
    arithmetic                     quantize, dequantize, codes, preimage, code_grid, with_codes
    product                        operands, plain_product, kernel_product, stored

The first three are required. The product has a default, which multiplies the dequantized weight in 16 bits.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import torch
    from qarl_kernels.groups import Groups
    from torch import Tensor

InputCodes: TypeAlias = Literal["int8", "fp8", "fp8_group"]
Shape: TypeAlias = tuple[int, int]  # (N, K) = (out_features, in_features)
Tensors: TypeAlias = "Mapping[str, Tensor]"
Quantized: TypeAlias = "tuple[dict[str, Tensor], Tensor]"  # stored tensors, and how many values are not finite
GROUP_SIZES = (32, 64, 128)
CHANNEL = -1
DEFAULT_GROUP_SIZE = 128
GRIDS = ("compressed-tensors", "symmetric7")
SCALE_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype (torch's name) of a stored tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)
        assert bits is not None, f"{self.dtype} has no size"
        return prod(self.shape) * int(bits[0]) // 8


class Codes(NamedTuple):
    """Quantized activations.

    codes: (M, K) int8 or float8_e4m3fn. scale: float32 (M, 1), or (M, ceil(K / 128)) with one scale per token and 128
    features. dtype: Dtype of the product.
    """

    codes: Tensor
    scale: Tensor
    dtype: torch.dtype


class CodeGrid(NamedTuple):
    """The values (code - zero) * step that the codes of a weight [N, K] may stand for.

    levels: (L,) float32, the codes in ascending order. step, zero: float32 (N, G), one per group of K / G inputs.
    """

    levels: Tensor
    step: Tensor
    zero: Tensor


@dataclass(frozen=True)
class Scheme(ABC):
    """Storage format and product of quantized Linear layers.

    Build one with `qarl_formats.registry.make_scheme`, which checks the arguments.

    Methods with an argument `kernels` run Triton kernels if it is True, for tensors on a GPU (or in Triton's
    interpreter) and 16-bit activations, and plain torch if it is False. Stored tensors have the same bits either way.

    Attributes:
        group_size: Input features that share a scale. None: the whole row (per channel), or the scheme's fixed size.
        symmetric: False stores a zero point per group.
        grid: "compressed-tensors" (absmax / 7.5, codes -8..7) or "symmetric7" (absmax / 7, codes -7..7).
        scale_dtype: dtype in which weight scales are stored; codes are computed from the stored value.
    """

    group_size: int | None = None
    symmetric: bool = True
    grid: str = GRIDS[0]
    scale_dtype: str = SCALE_DTYPES[0]

    # --- properties
    name: ClassVar[str]
    description: ClassVar[str]
    """One line for help and documentation."""
    weight_bits: ClassVar[int | None] = None
    weight_type: ClassVar[str | None] = None
    """"int" or "float"; None: weights are not quantized."""
    activation: ClassVar[str | None] = None
    """dtype to which activations are quantized dynamically; None: they are not."""
    input_codes: ClassVar[InputCodes | None] = None
    """Form in which `kernel_product` reads activations: codes and a scale per token ("fp8_group": per token and 128
    features), or None: 16-bit values."""

    # --- options
    group_sizes: ClassVar[tuple[int, ...]] = ()
    """Valid group sizes beside CHANNEL; empty: the group size is fixed."""
    zero_points: ClassVar[bool] = False
    scale_dtypes: ClassVar[tuple[str, ...]] = SCALE_DTYPES
    """Valid dtypes of the stored `weight_scale`; empty: the scheme fixes it and ignores `scale_dtype`."""
    grids: ClassVar[tuple[str, ...]] = GRIDS[:1]
    chooses_codes: ClassVar[bool] = False
    """Whether codes other than the nearest ones can be chosen, see `qarl_formats.gptq`."""

    # --- where it runs
    capability: ClassVar[tuple[int, int]] = (0, 0)
    """Lowest compute capability of its Triton kernels, if it is above that of all kernels."""
    vllm_cpu: ClassVar[bool] = True
    """Whether vLLM's CPU build can multiply it."""
    row_block: ClassVar[int] = 1
    """Consecutive output features that share a scale. Layers that vLLM fuses must consist of whole blocks."""
    tolerance: ClassVar[float]
    """Largest mean |delta log-prob| per token, in nats, at which another program's reading of an export counts as the
    same policy. Other kernels sum in another order and round elsewhere; if activations are quantized, a small
    difference crosses rounding steps and grows. A wrong scale, a transposed group or a missing tensor costs 1 or more.
    """

    # --- names in compressed-tensors
    file_format: ClassVar[str]
    strategies: ClassVar[tuple[str, ...]] = ("channel",)

    @property
    def quantized(self) -> bool:
        return self.weight_bits is not None

    @property
    def packed(self) -> bool:
        """Whether several codes share a word (`weight_packed`); otherwise each has a byte (`weight`)."""
        return self.weight_bits == 4

    @property
    def unpackable(self) -> bool:
        """Whether packed codes can also be stored one per byte, which vLLM's CPU kernels read."""
        return False

    def num_groups(self, in_features: int) -> int:
        """Return the number of scales per output row (or block of rows) of a Linear with `in_features` inputs."""
        return 1 if self.group_size is None else in_features // self.group_size

    def shape_fault(self, out_features: int, in_features: int) -> str | None:
        """Return why a weight of this shape cannot be stored, and the fix; None if it can."""
        if self.group_size is None or in_features % self.group_size == 0:
            return None
        fits = [str(size) for size in self.group_sizes if in_features % size == 0] + ["-1 (one group per row)"]
        return f"group_size {self.group_size} does not divide its {in_features} input features; use {' or '.join(fits)}"

    # --- rows: weights concatenated along dim 0

    def rows_per_entry(self, suffix: str) -> int | None:
        """Return the output features per row of a stored tensor or operand. None: one value for the whole weight."""
        if suffix in ("weight_shape", "weight_global_scale"):
            return None
        if suffix == "weight_zero_point":
            return 8
        return self.row_block if suffix == "weight_scale" else 1

    @property
    def row_unit(self) -> int:
        """Number of consecutive output features that share a stored value; only multiples of it can be concatenated."""
        return max(self.row_block, 1 if self.symmetric else 8)

    def can_concatenate(self, widths: Sequence[int]) -> bool:
        """Whether concatenating weights leaves their stored values unchanged. widths: Output features of each."""
        return all(width % self.row_unit == 0 for width in widths[:-1])

    def split(self, tensors: Tensors, widths: Sequence[int]) -> list[dict[str, Tensor]]:
        """Split the tensors of concatenated weights, as views. widths: Output features of each weight."""
        parts: list[dict[str, Tensor]] = [{} for _ in widths]
        for name, tensor in tensors.items():
            rows, own = self.rows_per_entry(name), [tensor] * len(widths)
            if name == "weight_shape":
                own = [tensor.new_tensor((width, int(tensor[1]))) for width in widths]
            elif rows is not None:
                own = list(tensor.split([-(-width // rows) for width in widths]))
            for part, its in zip(parts, own, strict=True):
                part[name] = its
        return parts

    # --- on disk

    def tensor_specs(self, out_features: int, in_features: int, unpacked: bool = False) -> dict[str, TensorSpec]:
        """Return the stored tensors of one Linear by suffix, in file order.

        unpacked: int4 codes one per byte (int-quantized), which vLLM's W4A8 kernel for CPUs reads; see `unpackable`.
        """
        raise NotImplementedError(f"scheme {self.name} stores no codes")

    def weight_arguments(self) -> dict[str, Any]:
        """Return arguments of compressed-tensors' `QuantizationArgs` that describe the weights."""
        strategy = "channel" if self.group_size is None else "group"
        return {
            "num_bits": self.weight_bits,
            "type": self.weight_type,
            "symmetric": self.symmetric,
            "strategy": strategy,
            "group_size": self.group_size,
        }

    def activation_arguments(self) -> dict[str, Any] | None:
        """Return these arguments for the activations; None if they are not quantized."""
        if self.activation is None:
            return None
        kind = "int" if self.activation.startswith("int") else "float"
        return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}

    @property
    def text(self) -> str:
        """One line for the model card of an export."""
        details = [f"scales in {self.scale_dtype}"] if self.quantized and self.scale_dtypes else []
        if self.group_sizes:
            details.append("per row" if self.group_size is None else f"per {self.group_size} inputs")
        details += [] if self.symmetric else ["zero points"]
        details += [] if self.grid == GRIDS[0] else ["codes -7 to 7"]
        return f"{self.name}: {self.description}" + (f" ({', '.join(details)})" if details else "")

    def library_codes(self, stored: Tensors, shape: Shape) -> Tensor:
        """Return `codes`, unpacked by compressed-tensors' own code, to check exported files."""
        return stored["weight"]

    def library_fault(self, out_features: int, in_features: int) -> str | None:
        """Return why compressed-tensors (and so transformers) cannot dequantize a weight of this shape, or None."""
        return None

    def stores_like(self, other: Scheme, shape: Shape) -> bool:
        """Whether the stored tensors of a weight have the same values in both schemes; activations may differ.

        Ignores the grid, which determines how codes are chosen but not their values.
        """
        if not (self.quantized and other.quantized):
            return False
        groups = [(one.row_block, one.num_groups(shape[1]), one.tensor_specs(*shape)) for one in (self, other)]
        return groups[0] == groups[1] and self.weight_type == other.weight_type

    # --- arithmetic

    def shared(self, weights: Iterable[Tensor]) -> Tensor | None:
        """Return the value that weights share if they are multiplied as one, such as a global scale, or None.

        It may depend only on their largest magnitude, which is all that ranks exchange.

        weights: Float32 masters; may be a generator.
        """
        return None

    def quantize(self, weight: Tensor, kernels: bool = False, shared: Tensor | None = None) -> Quantized:
        """Quantize a contiguous float32 master [N, K]. Does not synchronize or check the shape (`check_shape`).

        shared: Result of `shared` for this weight and those it is multiplied with; None: it is multiplied alone.

        Returns:
            The stored tensors by suffix, in the order of `tensor_specs`, and the number of NaN or infinite values (a
            scalar on the device). Unless that is 0, the tensors are meaningless.
        """
        raise NotImplementedError(f"scheme {self.name} does not quantize")

    @abstractmethod
    def dequantize(self, tensors: Tensors, shape: Shape, dtype: torch.dtype, kernels: bool = False) -> Tensor:
        """Return the dequantized values [N, K], computed in float32 and rounded once to `dtype`."""

    def codes(self, tensors: Tensors, shape: Shape) -> Tensor:
        """Return the codes [N, K], one per element."""
        raise NotImplementedError(f"scheme {self.name} has no codes")

    def code_grid(self, tensors: Tensors, shape: Shape) -> CodeGrid:
        """Return the values that the codes of stored tensors may take; only if `chooses_codes`."""
        raise NotImplementedError(f"the codes of scheme {self.name} are the nearest ones")

    def with_codes(self, tensors: Tensors, codes: Tensor) -> dict[str, Tensor]:
        """Return stored tensors with other codes. codes: float32 [N, K], levels of `code_grid`."""
        raise NotImplementedError(f"the codes of scheme {self.name} are the nearest ones")

    def preimage(self, tensors: Tensors, shape: Shape) -> tuple[Tensor, Tensor]:
        """Return a master that `quantize` turns into these stored tensors; see `qarl_formats.preimage`.

        Its values are the dequantized ones, except at the ends of each group. Default: the dequantized values.

        Returns:
            The master, float32 [N, K]. The number of groups (blocks, rows) without a preimage, int64 []: they keep
            their dequantized values, and quantize to other codes or scales. By default the weight is one group.
        """
        import torch

        from qarl_formats.bits import same_bits

        master = self.dequantize(tensors, shape, torch.float32)
        again, _ = self.quantize(master)
        same = all(same_bits(again[name], tensor) for name, tensor in tensors.items())
        return master, torch.tensor(0 if same else 1)

    def rounded_input(self, x: Tensor) -> Tensor:
        """Return x quantized and dequantized, in x's dtype; x itself if activations are not quantized."""
        if self.activation is None:
            return x
        from qarl_kernels.activation import quantize_activation_fp8, quantize_activation_int8

        codes, scale = (quantize_activation_int8 if self.activation == "int8" else quantize_activation_fp8)(x)
        return (codes.float() * scale).to(x.dtype)

    def fp8_codes(self, operands: Tensors) -> tuple[Tensor, Tensor] | None:
        """Return e4m3 codes (N, K) and scales (N, 1) for an FP8 backward; None if the operands are not FP8."""
        return None

    # --- product

    plain_operands: ClassVar[tuple[str, ...]] = ("weight_values",)
    """The operands that `plain_product` reads, the matrix (N, K) first. `weight_values` are dequantized values."""

    def operands(self, tensors: Tensors, shape: Shape, dtype: torch.dtype, kernels: bool) -> dict[str, Tensor]:
        """Return the tensors that the product reads, by name; stored tensors appear as the same objects.

        dtype: Dtype of the activations. The default method returns the stored tensors, and `weight_values`.
        """
        values = self.dequantize(tensors, shape, dtype, kernels)
        wide = not kernels and values.device.type == "cpu"  # CPUs multiply in float32
        stored = {name: tensor for name, tensor in tensors.items() if name != "weight_shape"}
        return stored | {"weight_values": values.float() if wide else values}

    def stored(self, operands: Tensors, shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the stored tensors by suffix, read back from `operands`: the inverse of `operands` for any values."""
        import torch

        given = {**operands, "weight_shape": torch.tensor(shape)}
        return {suffix: given[suffix] for suffix in self.tensor_specs(*shape)}

    def parts(self, operands: Tensors, widths: Sequence[int]) -> list[dict[str, Tensor]]:
        """Split the operands that `plain_product` reads, see `split`."""
        return self.split({name: operands[name] for name in self.plain_operands}, widths)

    def kernel_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of one weight's operands on a GPU, in addition to the stored tensors."""
        return 0

    def matmul(
        self,
        x: Tensor | Codes,
        operands: Tensors,
        out_features: int,
        bias: Tensor | None,
        kernels: bool,
        groups: Groups | None = None,
        gathered: bool = False,
    ) -> Tensor:
        """Compute `LowBitWeight.matmul` of a weight given by its operands. out_features: Those of one expert."""
        if kernels:
            if not isinstance(x, Codes):
                x = x.contiguous()
                if self.input_codes is not None:
                    from qarl_kernels.quantize import activation_codes

                    x = Codes(*activation_codes(x, self.input_codes), x.dtype)
            return self.kernel_product(x, operands, out_features, bias, groups, gathered)
        assert not isinstance(x, Codes), "plain torch quantizes activations by itself"
        if groups is None:
            return self.plain_product(x, operands, bias)
        y = x.new_empty(groups.rows, out_features)
        starts = groups.starts.tolist()
        for expert, part in enumerate(self.parts(operands, [out_features] * groups.experts)):
            rows = slice(starts[expert], starts[expert + 1])
            own = x[groups.order[rows] // groups.slots] if gathered else x[rows]
            if len(own):
                y[rows] = self.plain_product(own, part, bias)
        return y

    def plain_product(self, x: Tensor, operands: Tensors, bias: Tensor | None) -> Tensor:
        """Return the dense product in plain torch, (M, K) -> (M, N). Default: with dequantized values."""
        from qarl_kernels import reference

        return reference.dense(x, operands[self.plain_operands[0]], bias)

    def kernel_product(
        self, x: Tensor | Codes, operands: Tensors, n: int, bias: Tensor | None, groups: Groups | None, gathered: bool
    ) -> Tensor:
        """Run `matmul` with Triton. Default: with dequantized values.

        x: Contiguous; codes if the scheme has `input_codes`, else values. n: Output features of one expert.
        """
        assert not isinstance(x, Codes), f"scheme {self.name} multiplies 16-bit activations"
        weight = operands[self.plain_operands[0]]
        from qarl_kernels.gemm import dense

        return dense(x, weight, bias, groups=groups, gathered=gathered)


def check_shape(scheme: Scheme, name: str, out_features: int, in_features: int) -> None:
    """Check that a Linear with weight [out_features, in_features] can be stored in `scheme`.

    Raises:
        ValueError: The shape does not fit, for example because the group size does not divide `in_features`; names the
            layer and the fix.
    """
    if out_features < 1 or in_features < 1:
        raise ValueError(f"{name}: weight [{out_features}, {in_features}] is empty; add the layer to the ignore list")
    if fault := scheme.shape_fault(out_features, in_features):
        raise ValueError(f"{name}: {fault}, or add the layer to the ignore list")


def is_ignored(name: str, ignore: list[str]) -> bool:
    """Whether module `name` stays unquantized: an entry equals it, or `re:<regex>` matches from its start.

    The rule of compressed-tensors `match_name` (`re.match`, so a pattern for a suffix starts with `.*`).

    Raises:
        ValueError: The regular expression of an entry does not compile.
    """
    for entry in ignore:
        if not entry.startswith("re:"):
            if entry == name:
                return True
            continue
        try:
            matched = re.match(entry.removeprefix("re:"), name)
        except re.error as error:
            raise ValueError(f"ignore entry {entry!r} is not a valid regular expression: {error}") from None
        if matched:
            return True
    return False
