"""Back from what a product reads to what was published: values narrowed without loss, scales out of their columns.

A product reads weights in a form prepared for it: widened, dequantized, tiled. What a sampler is proved to hold must
come from that form, since that is what multiplies.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from qarl_formats.packing import pack_int4
from qarl_formats.quantize import QuantizedWeight, dequantize_weight
from torch import Tensor

BLOCK = 1 << 17  # elements compared at once, which a core's cache holds in float32
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def narrowed(wide: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The tensor that `wide` widens, of `dtype`; None where a value of `wide` is none of `dtype`.

    wide: (N, ...), contiguous. Where it is of `dtype` already, `wide` itself.
    """
    if wide.dtype == dtype:
        return wide
    narrow = wide.to(dtype)
    same = all(_same_bits(narrow[rows].to(wide.dtype), wide[rows]) for rows in _blocks(wide))
    return narrow if same else None


def packed(wide: Tensor) -> Tensor | None:
    """The packed words of int4 codes held one to an element; None where a value is no int4 code. wide: (N, K)."""
    codes = narrowed(wide, torch.int8)
    if codes is None or (codes.numel() and (codes.amin() < -8 or codes.amax() > 7)):
        return None
    return pack_int4(codes)


def stands_for(weight: QuantizedWeight, values: Tensor, dtype: torch.dtype) -> bool:
    """Whether `values` are, bit for bit, what the codes of `weight` dequantize to.

    values: (N, K), the dequantized weight rounded to `dtype` and held in that or in float32.
    """
    return all(
        _same_bits(dequantize_weight(_rows_of(weight, rows), dtype).to(values.dtype), values[rows])
        for rows in _blocks(values)
    )


def _rows_of(weight: QuantizedWeight, rows: slice) -> QuantizedWeight:
    """Some rows of a weight. rows: from a multiple of 8, where a word of zero points starts."""
    words = slice(rows.start // 8, -(-rows.stop // 8))
    cut = {"weight_zero_point": words, "weight_shape": slice(None)}
    tensors = {suffix: tensor[cut.get(suffix, rows)] for suffix, tensor in weight.tensors.items()}
    return QuantizedWeight(weight.scheme, tensors, (rows.stop - rows.start, weight.shape[1]))


def _blocks(tensor: Tensor) -> Iterator[slice]:
    """Slices of the rows, each from a multiple of 8."""
    height = max(8, BLOCK // max(1, tensor[:1].numel()) // 8 * 8)
    for start in range(0, len(tensor), height):
        yield slice(start, min(start + height, len(tensor)))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    words = _WORDS[a.dtype.itemsize]
    return torch.equal(a.view(words), b.view(words))


def scale_of_columns(meta: Tensor, shape: torch.Size, one_group: bool, dtype: torch.dtype) -> Tensor:
    """The scales that stand in `qarl_kernels.tile.meta_w4a8`, NaN where what stands there is none of `dtype`.

    shape: (N, groups), of the scales. one_group: a row has one, which stands in every entry.
    """
    wide = _entries(meta, shape, one_group)
    narrow = wide.to(dtype)
    same = narrow.to(wide.dtype).view(torch.int32) == wide.view(torch.int32)
    if one_group:
        same &= (meta[:, : shape[0]].view(torch.int32) == wide.view(torch.int32)).all(0)
    return torch.where(same, narrow, torch.nan).t().contiguous()


def scale_and_zero_point_of_columns(
    meta: Tensor, shape: torch.Size, one_group: bool, symmetric: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Scales and packed zero points that stand in `qarl_kernels.tile.meta_w4a16`, the scales NaN where there are none.

    shape: (N, groups), of the scales. one_group: see `scale_of_columns`. Zero points: int32 (ceil(N / 8), groups), None
    if symmetric.
    """
    value = _entries(meta, shape, one_group)
    scale, high = value.to(torch.int16).view(dtype), value >> 16  # the conversion keeps the low half
    nibble = high & 15
    same = (high & 0xFFF0) == (0xC300 if dtype == torch.bfloat16 else 0xE400)
    if symmetric:
        same &= nibble == 8
    if one_group:
        same &= (meta[:, : shape[0]] == value).all(0)
    found = torch.where(same, scale, torch.nan).t().contiguous()
    if symmetric:
        return found, None
    missing = -shape[0] % 8
    eights = torch.nn.functional.pad(nibble, (0, missing)).view(shape[1], -1, 8).long()
    words = (eights << torch.arange(0, 32, 4, device=meta.device)).sum(-1)
    return found, words.to(torch.int32).t().contiguous()


def _entries(meta: Tensor, shape: torch.Size, one_group: bool) -> Tensor:
    """(groups, N) of the entries."""
    return meta[: 1 if one_group else shape[1], : shape[0]].contiguous()
