"""What a quantization scheme is. Imports no torch: a configuration is checked without.

A scheme is a class in `qarl_formats.schemes`, one file each, that `qarl_formats.registry` knows by its name:

    names, shapes, config.json     tensor_specs, weight_arguments, activation_arguments, file_format
    arithmetic                     quantize, dequantize, codes
    products                       operands, multiply, stored: on the CPU in plain torch, on a GPU by Triton kernels
    what it takes and what it is   the class attributes
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

if TYPE_CHECKING:
    import torch
    from qarl_kernels.moe.groups import Groups
    from torch import Tensor

    from qarl_formats.prepared import PreparedWeight
    from qarl_formats.quantize import QuantizedWeight

InputCodes: TypeAlias = Literal["int8", "fp8", "fp8_group"]
GROUP_SIZES = (32, 64, 128)
CHANNEL = -1
DEFAULT_GROUP_SIZE = 128
GRIDS = ("compressed-tensors", "symmetric7")
SCALE_DTYPES = ("bfloat16", "float16", "float32")
_ITEM_BYTES = {
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "bfloat16": 2,
    "float16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
}


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype (torch's name of it) of a stored tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Scheme(ABC):
    """How the Linear layers of a model are stored and multiplied. Build one with
    `qarl_formats.registry.make_scheme`, which checks.

    group_size: input features that share a scale; None = the whole row (per channel), or what the scheme fixes.
    symmetric: False stores a zero point per group.
    grid: "compressed-tensors" (absmax / 7.5, codes -8..7) or "symmetric7" (absmax / 7, codes -7..7).
    scale_dtype: dtype the weight scales are stored in; codes are computed from the stored value.

    Methods with an argument `kernels` run Triton kernels where it is True, for tensors on a GPU (or in Triton's
    interpreter) and 16-bit activations, and plain torch where it is False; stored tensors are the same to the bit.
    """

    group_size: int | None = None
    symmetric: bool = True
    grid: str = GRIDS[0]
    scale_dtype: str = SCALE_DTYPES[0]

    # --- what it is
    name: ClassVar[str]
    description: ClassVar[str]
    """One line for help and documentation."""
    weight_bits: ClassVar[int | None] = None
    weight_type: ClassVar[str | None] = None
    """"int" or "float"; None: weights are not quantized."""
    activation: ClassVar[str | None] = None
    """dtype that activations are quantized to, dynamically; None: they are not."""
    input_codes: ClassVar[InputCodes | None] = None
    """What its Triton product reads of activations: codes and a scale a token, of the group kind one for each 128
    features too; None: their 16-bit values."""

    # --- what it takes
    group_sizes: ClassVar[tuple[int, ...]] = ()
    """Group sizes to choose from, beside CHANNEL; none: there is nothing to choose."""
    zero_points: ClassVar[bool] = False
    scale_dtypes: ClassVar[tuple[str, ...]] = SCALE_DTYPES
    """Stored dtypes of `weight_scale` to choose from; none: the scheme fixes it, and `scale_dtype` means nothing."""
    grids: ClassVar[tuple[str, ...]] = GRIDS[:1]

    # --- where it runs
    capability: ClassVar[tuple[int, int]] = (0, 0)
    """Compute capability that its Triton kernels need, beyond what they all do."""
    vllm_cpu: ClassVar[bool] = True
    """Whether vLLM's build for CPUs has a product of its own for it."""
    row_block: ClassVar[int] = 1
    """Output features that share a scale. Layers that vLLM fuses have whole blocks of them."""
    tolerance: ClassVar[float]
    """Mean |delta log-prob| a token up to which another program's product of an export counts as the same policy.
    Other kernels sum in another order and round at other places; where activations are quantized a small difference
    crosses rounding steps and grows. A wrong scale, a transposed group or a lost tensor costs 1 and more."""

    # --- what compressed-tensors calls it
    file_format: ClassVar[str]
    strategies: ClassVar[tuple[str, ...]] = ("channel",)
    shape_suffix: ClassVar[str] = "weight"
    """The stored tensor that `shape_from` reads."""

    @property
    def quantized(self) -> bool:
        return self.weight_bits is not None

    @property
    def packed(self) -> bool:
        """Whether codes are stored several to a word (`weight_packed`) rather than one to a byte (`weight`)."""
        return self.weight_bits == 4

    @property
    def unpackable(self) -> bool:
        """Whether packed codes may be stored one to a byte as well, which vLLM's kernels for CPUs read."""
        return False

    def num_groups(self, in_features: int) -> int:
        """Scales per output row (or block of rows) of a Linear with `in_features` inputs."""
        return 1 if self.group_size is None else in_features // self.group_size

    def shape_fault(self, out_features: int, in_features: int) -> str | None:
        """Why a weight of this shape cannot be stored, and what would do; None where it can."""
        if self.group_size is None or in_features % self.group_size == 0:
            return None
        fits = [str(size) for size in self.group_sizes if in_features % size == 0] + ["-1 (one group a row)"]
        return f"group_size {self.group_size} does not divide its {in_features} input features; use {' or '.join(fits)}"

    # --- on disk

    @abstractmethod
    def tensor_specs(self, out_features: int, in_features: int, unpacked: bool = False) -> dict[str, TensorSpec]:
        """The tensors of one Linear by suffix, in the order in which they are stored. unpacked: see `unpackable`."""

    def shape_from(self, tensor: Tensor) -> tuple[int, int] | None:
        """(N, K) by the stored tensor `shape_suffix`; None where no weight has one of its shape."""
        return tuple(tensor.shape) if tensor.ndim == 2 else None  # type: ignore[return-value]

    def weight_arguments(self) -> dict[str, Any]:
        """How compressed-tensors describes the weights: arguments of its `QuantizationArgs`."""
        strategy = "channel" if self.group_size is None else "group"
        return {
            "num_bits": self.weight_bits,
            "type": self.weight_type,
            "symmetric": self.symmetric,
            "strategy": strategy,
            "group_size": self.group_size,
        }

    def activation_arguments(self) -> dict[str, Any] | None:
        """The same for the activations; None where they are not quantized."""
        if self.activation is None:
            return None
        kind = "int" if self.activation.startswith("int") else "float"
        return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}

    @property
    def text(self) -> str:
        """One line for the card of an export."""
        scales = "a scale per row" if self.group_size is None else f"a scale per {self.group_size} inputs"
        kind = f"int{self.weight_bits}" if self.weight_type == "int" else "float8_e4m3fn"
        zero = "" if self.symmetric else " and a zero point"
        grid = "" if self.grid == GRIDS[0] else ", codes -7 to 7"
        inputs = "inputs not quantized" if self.activation is None else f"inputs in {self.activation}, per token"
        return f"{self.name}: {kind} weights with {scales} ({self.scale_dtype}){zero}{grid}; {inputs}"

    def library_codes(self, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
        """`codes` of stored tensors as compressed-tensors' own code unpacks them, for proofs of exported files."""
        return stored["weight"]

    def library_fault(self, out_features: int, in_features: int) -> str | None:
        """Why compressed-tensors (and so transformers) cannot dequantize a weight of this shape; None: it can."""
        return None

    # --- arithmetic

    def shared(self, weights: Iterable[Tensor]) -> Tensor | None:
        """What weights that an engine multiplies as one are quantized with in common, from their float32 masters.

        None where there is nothing of the kind; `weights` may make its tensors as they are asked for.
        """
        return None

    @abstractmethod
    def quantize(
        self, weight: Tensor, kernels: bool = False, shared: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Quantize a float32 master [N, K] that fits (`qarl_formats.quantize.quantize_weight` is what callers use).

        Returns the stored tensors by suffix, in the order of `tensor_specs`, and how many values are NaN or infinite
        (a scalar on the device; unless it is 0 the tensors mean nothing). shared: what `shared` gave for this weight
        and those that it is multiplied with; None: it stands alone.
        """

    @abstractmethod
    def dequantize(self, weight: QuantizedWeight, dtype: torch.dtype, kernels: bool = False) -> Tensor:
        """The values [N, K] that the codes stand for, computed in float32 and rounded once to `dtype`."""

    @abstractmethod
    def codes(self, weight: QuantizedWeight) -> Tensor:
        """The codes one element each, [N, K] of the dtype of a code."""

    def changed(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor], widths: Sequence[int]) -> Tensor:
        """How many codes differ between the stored tensors of two versions: int64 [len(widths)] on their device.

        widths: output features of each weight of a stack, or of the only one.
        """
        key = "weight_packed" if self.packed else "weight"
        import torch

        from qarl_formats.counts import nonzero_counts

        difference = before[key].view(torch.uint8) ^ after[key].view(torch.uint8)
        if self.packed:
            return nonzero_counts(difference & 0x0F, widths) + nonzero_counts(difference & 0xF0, widths)
        return nonzero_counts(difference, widths)

    def rounded_input(self, x: Tensor) -> Tensor:
        """x after its quantization and back, in x's dtype; x itself where activations are not quantized."""
        if self.activation is None:
            return x
        from qarl_kernels.activation import quantize_activation_fp8, quantize_activation_int8

        codes, scale = (quantize_activation_int8 if self.activation == "int8" else quantize_activation_fp8)(x)
        return (codes.float() * scale).to(x.dtype)

    def fp8_codes(self, operands: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        """e4m3 codes (N, K) and scales (N, 1) of a kernel's operands, for a backward in FP8; None: it has others."""
        return None

    # --- products

    @abstractmethod
    def operands(self, weight: QuantizedWeight, dtype: torch.dtype, kernels: bool) -> dict[str, Tensor]:
        """A weight as `multiply` reads it, by name. dtype: of the activations. Stored tensors stand as themselves."""

    @classmethod
    def parts(cls, operands: Mapping[str, Tensor], widths: list[int]) -> list[dict[str, Tensor]]:
        """The CPU's operands of layers that lie under one another in a fused weight, each of so many rows."""
        blocks = [-(-width // cls.row_block) for width in widths]
        split = [tensor.split(blocks if name == "weight_scale" else widths) for name, tensor in operands.items()]
        return [dict(zip(operands, part, strict=True)) for part in zip(*split, strict=True)]

    def kernel_bytes(self, out_features: int, in_features: int) -> int:
        """Bytes of a GPU's operands of one weight beside its stored tensors."""
        return 0

    @classmethod
    @abstractmethod
    def multiply(
        cls, x: Tensor, operands: Mapping[str, Tensor], out_features: int, bias: Tensor | None, kernels: bool
    ) -> Tensor:
        """The product, whose rows keep their bits in every batch.

        x: (M, K) of the compute dtype, contiguous; bias: (N,) or None. Returns (M, N) of x's dtype.
        """

    @classmethod
    def multiply_codes(
        cls,
        codes: Tensor,
        scale: Tensor,
        operands: Mapping[str, Tensor],
        out_features: int,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """`multiply` with Triton of activations that are quantized already, where `input_codes` says that it can.

        codes: (M, K); scale: (M, 1) or (M, ceil(K / 128)) float32. Returns (M, N) of dtype, the bits of `multiply`.
        """
        raise AssertionError(f"scheme {cls.name} multiplies 16-bit activations")

    @classmethod
    def multiply_grouped(
        cls,
        x: Tensor,
        operands: Mapping[str, Tensor],
        out_features: int,
        groups: Groups,
        gathered: bool,
        kernels: bool,
    ) -> Tensor:
        """Rows times the weights of their experts; each has the bits of `multiply` with its expert's own weight.

        x: (T, K), the tokens, if gathered, else (R, K) in sorted order; contiguous. operands: of the stack of all
        experts, (E * N, K). out_features: N, of one expert. Returns (R, N) of x's dtype in sorted order.

        In plain torch one expert after the other. Raises ValueError where `check_grouped` and `grouped_by_kernel` do.
        """
        cls.check_grouped(operands, out_features, groups.experts)
        if kernels:
            return cls.grouped_by_kernel(x.contiguous(), operands, out_features, groups, gathered)
        y = x.new_empty(groups.rows, out_features)
        starts = groups.starts.tolist()
        for expert, part in enumerate(cls.parts(operands, [out_features] * groups.experts)):
            rows = slice(starts[expert], starts[expert + 1])
            own = x[groups.order[rows] // groups.slots] if gathered else x[rows]
            if len(own):
                y[rows] = cls.multiply(own, part, out_features, None, False)
        return y

    @classmethod
    def grouped_by_kernel(
        cls, x: Tensor, operands: Mapping[str, Tensor], out_features: int, groups: Groups, gathered: bool
    ) -> Tensor:
        """`multiply_grouped` by Triton. Raises ValueError where the scheme has no such kernel."""
        raise ValueError(f"scheme {cls.name} has no kernel for experts; set quant.kernels: reference")

    @classmethod
    def multiply_codes_grouped(
        cls,
        codes: Tensor,
        scale: Tensor,
        operands: Mapping[str, Tensor],
        out_features: int,
        groups: Groups,
        gathered: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        """`multiply_grouped` with Triton of activations that are quantized already, as `multiply_codes` is of one.

        codes: (T, K) if gathered, else (R, K); scale: as many rows. Returns (R, N) of dtype.
        """
        raise AssertionError(f"scheme {cls.name} multiplies 16-bit activations")

    @classmethod
    def check_grouped(cls, operands: Mapping[str, Tensor], out_features: int, experts: int) -> None:
        """Raise ValueError unless experts of so many output features can be one stack: none share a stored value."""
        unit = 8 if "weight_zero_point" in operands else cls.row_block
        if experts > 1 and out_features % unit:
            raise ValueError(
                f"experts of {out_features} output features would share stored values of {cls.name}, which span "
                f"{unit}; use another scheme, or add the experts to the ignore list"
            )

    @abstractmethod
    def stored(
        self, operands: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype, kernels: bool
    ) -> dict[str, Tensor]:
        """The stored tensors by suffix, read back from `operands`: undoes `operands`, whatever its values are."""

    @abstractmethod
    def dequantized(self, prepared: PreparedWeight, dtype: torch.dtype) -> Tensor:
        """W (N, K) for the backward: the values of `dequantize`, on the CPU held in float32."""


def check_shape(scheme: Scheme, name: str, out_features: int, in_features: int) -> None:
    """Check that a Linear with weight [out_features, in_features] can be stored in `scheme`.

    Raises:
        ValueError: the shape does not fit, as a group size that does not divide `in_features`; names the layer and
            what would do.
    """
    if out_features < 1 or in_features < 1:
        raise ValueError(f"{name}: weight [{out_features}, {in_features}] is empty; add the layer to the ignore list")
    if fault := scheme.shape_fault(out_features, in_features):
        raise ValueError(f"{name}: {fault}, or add the layer to the ignore list")


def is_ignored(name: str, ignore: list[str]) -> bool:
    """Whether module `name` stays unquantized: an entry equals it, or `re:<regex>` matches from its start.

    The rule of compressed-tensors `match_name` (`re.match`, so a pattern for a suffix starts with `.*`).

    Raises:
        ValueError: an entry's regex does not compile.
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
