"""The weight of a linear layer: its stored tensors, and the operands that the product reads.

One class serves every scheme, unquantized values, packed linears (q, k and v; gate and up) and all experts of a layer:
several weights are concatenated along dim 0. Rows are quantized independently, except for values that a scheme shares
over a whole tensor. So the stored tensors of a part are slices of those of the whole weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from qarl_kernels.groups import Groups
from torch import Tensor

from qarl_formats.bits import Proof
from qarl_formats.packing import unpack_zero_points
from qarl_formats.registry import make_scheme
from qarl_formats.rows import concatenate_rows, nonzero_counts
from qarl_formats.scheme import Codes, InputCodes, Scheme, check_shape
from qarl_formats.schemes.bf16 import OrdinaryProduct

UNQUANTIZED = make_scheme("bf16")


@dataclass(frozen=True, eq=False)
class LowBitWeight:
    """A weight (N, K) = (out_features, in_features) in one scheme.

    Attributes:
        scheme: How it is stored and multiplied; `UNQUANTIZED` for plain values.
        tensors: Stored tensors by compressed-tensors suffix, in the order of `scheme.tensor_specs`; plain values as
            `weight`.
        shape: (N, K).
        operands: Tensors that the product reads, by name; empty until `prepare`. Stored tensors appear as the same
            objects.
        dtype: Dtype of the activations, once prepared.
        kernels: Whether Triton multiplies; otherwise plain torch.
    """

    scheme: Scheme
    tensors: Mapping[str, Tensor]
    shape: tuple[int, int]
    operands: Mapping[str, Tensor] = field(default_factory=dict)
    dtype: torch.dtype | None = None
    kernels: bool = False

    @staticmethod
    def of_values(values: Tensor) -> LowBitWeight:
        """Return an unquantized weight. values: (N, K)."""
        n, k = values.shape
        return LowBitWeight(UNQUANTIZED, {"weight": values}, (n, k))

    @property
    def quantized(self) -> bool:
        return self.scheme.quantized

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device  # the last one may be weight_shape, which is on the CPU

    def codes(self) -> Tensor:
        """Return the codes [N, K], one per element: int8 for int4 and int8, float8_e4m3fn for FP8 and FP4."""
        return self.scheme.codes(self.tensors, self.shape)

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype, kernels: bool = False) -> Tensor:
        """Return the values [N, K]: (code - zero point) * scale in float32, rounded once to `dtype`."""
        return self.scheme.dequantize(self.tensors, self.shape, dtype, kernels)

    # --- product

    def prepare(self, dtype: torch.dtype, kernels: bool = False) -> LowBitWeight:
        """Return the same weight with the operands of its product.

        Args:
            dtype: Dtype of the activations, and of unquantized values.
            kernels: Multiply with Triton; needs tensors on a GPU and a 16-bit dtype.
        """
        operands = self.scheme.operands(self.tensors, self.shape, dtype, kernels)
        return replace(self, operands=operands, dtype=dtype, kernels=kernels)

    def matmul(
        self, x: Tensor | Codes, bias: Tensor | None = None, groups: Groups | None = None, gathered: bool = False
    ) -> Tensor:
        """Return x @ W^T + bias. The bits of a row do not depend on the batch.

        Args:
            x: (M, K) of `dtype`. With kernels, its codes of the kind `input_codes` give the same bits.
            bias: (N,) or None.
            groups: The rows of each expert, if this is the weight of all experts (E * N, K). Each row has the bits of
                the product with its expert's own weight.
            gathered: With groups, whether x has the tokens (T, K) in the batch's order; otherwise it has rows (R, K)
                sorted by expert.

        Returns:
            (M, N) of `dtype`; with groups (R, N), sorted by expert.

        Raises:
            ValueError: The shape of x or the number of experts does not fit, or experts share stored values.
        """
        width = self.shape[0] if groups is None else self._expert_width(groups.experts)
        if not isinstance(x, Codes):
            self._check_input(x, groups, gathered)
        return self.scheme.matmul(x, self.operands, width, bias, self.kernels, groups, gathered)

    def _check_input(self, x: Tensor, groups: Groups | None, gathered: bool) -> None:
        k = self.shape[1]
        if groups is None:
            if x.ndim != 2 or x.shape[1] != k:
                raise ValueError(f"x is {list(x.shape)}, but the weight takes (rows, {k}); reshape x")
            return
        rows = groups.rows // groups.slots if gathered else groups.rows
        if x.shape != (rows, k):
            raise ValueError(f"x is {list(x.shape)}, but the experts take ({rows}, {k}); reshape x")

    def _expert_width(self, experts: int) -> int:
        """Return N, the output features of one expert."""
        if self.shape[0] % experts:
            raise ValueError(f"{self.shape[0]} rows are not the weights of {experts} experts; concatenate them all")
        width = self.shape[0] // experts
        if experts > 1 and width % self.scheme.row_unit:
            raise ValueError(
                f"experts of {width} output features would share stored values of {self.scheme.name}, which span "
                f"{self.scheme.row_unit}; use another scheme, or add the experts to the ignore list"
            )
        return width

    @property
    def input_codes(self) -> InputCodes | None:
        """The kind of activation codes that `matmul` with kernels reads; None: values."""
        return self.scheme.input_codes

    def rounded_input(self, x: Tensor) -> Tensor:
        """Return x quantized and dequantized by the scheme, in x's dtype."""
        return self.scheme.rounded_input(x)

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return W (N, K) for the backward: the result of `dequantize`, in float32 on the CPU."""
        if not self.quantized:
            return self.operands["weight"]
        if (values := self.operands.get("weight_values")) is not None:
            return values
        # Operands override stored tensors: those of some schemes have the codes in float32 already.
        values = self.scheme.dequantize({**self.tensors, **self.operands}, self.shape, dtype, self.kernels)
        return values if self.kernels else values.to(self.operands[self.scheme.plain_operands[0]].dtype)

    def fp8_codes(self) -> tuple[Tensor, Tensor] | None:
        """Return e4m3 codes (N, K) and scales (N, 1) for an FP8 backward; None if the weight has no such codes."""
        return self.scheme.fp8_codes(self.operands)

    def stored(self, proof: Proof | None = None) -> dict[str, Tensor]:
        """Read the stored tensors back from the operands, by suffix, and verify that they give exactly these operands.

        Args:
            proof: Collects the comparisons, to synchronize with a GPU only once; None: verify immediately.

        Raises:
            ValueError: An operand has other bytes; names it. With a proof, its `settle` raises.
        """
        assert self.dtype is not None, "the weight was not prepared"
        tensors = self.scheme.stored(self.operands, self.shape, self.dtype)
        again = self.scheme.operands(tensors, self.shape, self.dtype, self.kernels)
        added = Proof() if proof is None else proof
        for name, operand in self.operands.items():
            added.add(f"{name} of the product does not match its codes and scales", operand, again[name])
        if proof is None:
            added.settle()
        return tensors

    # --- parts

    def split(self, widths: Sequence[int]) -> list[LowBitWeight]:
        """Return the weights that this one concatenates, as views, not prepared. widths: Output features of each."""
        parts = zip(self.scheme.split(self.tensors, widths), widths, strict=True)
        return [LowBitWeight(self.scheme, tensors, (width, self.shape[1])) for tensors, width in parts]


def ordinary_weight(values: Tensor, imitated: Scheme | None = None, kernels: bool = False) -> LowBitWeight:
    """Return the prepared weight of a learner that runs torch's own GEMM.

    Args:
        values: (N, K) of the compute dtype.
        imitated: The scheme by which activations are quantized and dequantized first (fake quantization); None: none.
        kernels: Multiply the weights of experts with Triton.
    """
    n, k = values.shape
    weight = {"weight": values.float() if values.device.type == "cpu" else values}  # CPUs multiply in float32
    return LowBitWeight(OrdinaryProduct(imitated=imitated), weight, (n, k), weight, values.dtype, kernels)


@torch.no_grad()
def quantize_weight(
    weight: Tensor, scheme: Scheme, name: str, kernels: bool = False, shared: Tensor | None = None
) -> LowBitWeight:
    """Quantize one master weight.

    Args:
        weight: float32 [N, K]; not changed.
        scheme: A quantized scheme (not bf16).
        name: Name of the tensor in errors.
        kernels: Use Triton, in one pass over a weight on a GPU; the tensors are the same.
        shared: Result of `scheme.shared` for it and the weights it is multiplied with; None: it is multiplied alone.

    Raises:
        ValueError: The scheme does not fit the shape, or a value is NaN or infinite.
    """
    assert scheme.quantized, f"{name}: scheme {scheme.name} does not quantize weights"
    assert weight.dtype == torch.float32 and weight.ndim == 2, f"{name}: need a float32 matrix, got {weight.dtype}"
    n, k = weight.shape
    check_shape(scheme, name, n, k)
    tensors, bad = scheme.quantize(weight.contiguous(), kernels, shared)
    if bad.item():
        count = weight.isfinite().logical_not_().sum().item()
        raise ValueError(
            f"{name}: {count} of {weight.numel()} values are NaN or infinite and cannot be quantized; "
            "go back to an earlier checkpoint or lower the learning rate"
        )
    return LowBitWeight(scheme, tensors, (n, k))


def can_concatenate(weights: Sequence[LowBitWeight]) -> bool:
    """Whether weights can be concatenated: same scheme, K and global scale, and no stored value spans two of them.

    Reads a global scale, which synchronizes with a GPU.
    """
    first, shared = weights[0], "weight_global_scale"
    if any(weight.scheme != first.scheme or weight.shape[1] != first.shape[1] for weight in weights):
        return False
    # Weights that were quantized together have one global scale; those of a foreign checkpoint may differ.
    if shared in first.tensors and any(not torch.equal(one.tensors[shared], first.tensors[shared]) for one in weights):
        return False
    return first.scheme.can_concatenate([weight.shape[0] for weight in weights])


@torch.no_grad()
def concatenate(weights: Sequence[LowBitWeight]) -> LowBitWeight:
    """Concatenate weights in order. The result is not prepared.

    weights: Must satisfy `can_concatenate`. Tensors that are adjacent in memory, such as results of `split`, are not
    copied.
    """
    first = weights[0]
    shape = sum(weight.shape[0] for weight in weights), first.shape[1]
    tensors = {}
    for suffix, tensor in first.tensors.items():
        if first.scheme.rows_per_entry(suffix) is not None:
            tensor = concatenate_rows([weight.tensors[suffix] for weight in weights])
        tensors[suffix] = torch.tensor(shape) if suffix == "weight_shape" else tensor
    return LowBitWeight(first.scheme, tensors, shape)


def codes_changed(before: LowBitWeight, after: LowBitWeight, widths: Sequence[int] | None = None) -> Tensor:
    """Count the codes (unquantized: values) that differ between two versions of one weight; scales do not count.

    The FP8 codes +0 and -0 are different codes.

    Args:
        before, after: Two versions of the weight.
        widths: Output features of each part to count separately. Default: one count for the whole weight.

    Returns:
        int64 [len(widths)] on the device.

    Raises:
        ValueError: The two have different schemes or shapes.
    """
    scheme, widths = before.scheme, widths or before.shape[:1]
    if scheme != after.scheme or before.shape != after.shape:
        raise ValueError(
            f"codes of {scheme.name} {before.shape} and {after.scheme.name} {after.shape} cannot be compared"
        )
    key = "weight_packed" if scheme.packed else "weight"
    old, new = before.tensors[key], after.tensors[key]
    if not scheme.quantized:
        return nonzero_counts(old != new, widths)
    difference = old.view(torch.uint8) ^ new.view(torch.uint8)
    if not scheme.packed:
        return nonzero_counts(difference, widths)
    return nonzero_counts(difference & 0x0F, widths) + nonzero_counts(difference & 0xF0, widths)


@torch.no_grad()
def groups_changed(before: LowBitWeight, after: LowBitWeight) -> tuple[int, int]:
    """Compare two weights of one shape whose schemes store alike (`Scheme.stores_like`), bit for bit.

    Returns:
        The number of groups (blocks, rows) in which a code, scale, zero point or global scale differs, and of all.
    """
    (n, k), scheme, scale = before.shape, before.scheme, before.tensors["weight_scale"]
    one, other = before.codes().view(torch.uint8), after.codes().view(torch.uint8)
    rows, width = scheme.row_block, scheme.row_block if scheme.row_block > 1 else k // scale.shape[1]
    whole = torch.nn.functional.pad(one != other, (0, -k % width, 0, -n % rows))
    differ = whole.view(scale.shape[0], rows, scale.shape[1], width).any(3).any(1)
    differ |= _bytes_of(scale).ne(_bytes_of(after.tensors["weight_scale"])).view(*scale.shape, -1).any(2)
    if (zero := before.tensors.get("weight_zero_point")) is not None:
        differ |= unpack_zero_points(zero, n) != unpack_zero_points(after.tensors["weight_zero_point"], n)
    if (shared := before.tensors.get("weight_global_scale")) is not None:
        differ |= shared != after.tensors["weight_global_scale"]
    return int(differ.sum()), differ.numel()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
