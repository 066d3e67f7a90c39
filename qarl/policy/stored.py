"""Back from what a product reads to what was published: values made anew and compared, scales out of their columns.

A product reads weights in a form prepared for it: widened, dequantized, tiled. What a sampler is proved to hold must
come from that form, since that is what multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from qarl_formats.quantize import QuantizedWeight
from torch import Tensor

BLOCK = 1 << 17  # elements compared at once, which a core's cache holds in float32
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def same_bits(prepared: Tensor, source: QuantizedWeight | Tensor, prepare: Callable[..., Tensor]) -> bool:
    """Whether `prepared` is, bit for bit, what `prepare` makes of `source`; a few rows at a time.

    prepared: (N, ...). source: what was published. prepare: from some rows of the source to the same rows of the form.
    """
    if prepared is source:
        return True
    return all(_equal(prepare(_rows_of(source, rows)), prepared[rows]) for rows in _blocks(prepared))


def _rows_of(weight: QuantizedWeight | Tensor, rows: slice) -> QuantizedWeight | Tensor:
    """Some rows of a weight. rows: from a multiple of 8, where a word of zero points starts."""
    if isinstance(weight, Tensor):
        return weight[rows]
    words = slice(rows.start // 8, -(-rows.stop // 8))
    cut = {"weight_zero_point": words, "weight_shape": slice(None)}
    tensors = {suffix: tensor[cut.get(suffix, rows)] for suffix, tensor in weight.tensors.items()}
    return QuantizedWeight(weight.scheme, tensors, (rows.stop - rows.start, weight.shape[1]))


def _blocks(tensor: Tensor) -> Iterator[slice]:
    """Slices of the rows, each from a multiple of 8."""
    height = max(8, BLOCK // max(1, tensor[:1].numel()) // 8 * 8)
    for start in range(0, len(tensor), height):
        yield slice(start, min(start + height, len(tensor)))


def _equal(a: Tensor, b: Tensor) -> bool:
    words = _WORDS[b.dtype.itemsize]
    return a.dtype == b.dtype and torch.equal(a.view(words), b.view(words))


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
