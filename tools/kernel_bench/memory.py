"""Section `quantize`: kernels that are bound by memory, as a share of what a copy reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from qarl_formats.quantize import dequantize_weight, quantize_weight
from qarl_kernels.activation import quantize_activation_fp8, quantize_activation_int8
from torch import Tensor

from kernel_bench.measure import Stopwatch, Wrong
from kernel_bench.peers import ERRORS, reason, vllm_quantizers
from kernel_bench.problems import qarl_scheme, quantize_blocks
from kernel_bench.shapes import BLOCK, MATRICES

Row = dict[str, Any]
Result = tuple[Any, ...]
CHECKED = 512  # leading rows that are compared with plain torch, bit for bit; a multiple of fp8_block's 128


def same(results: Result, expected: Result) -> None:
    """Raise `Wrong` unless the leading rows of every result are bit-equal to the expected ones."""
    for index, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        rows = result[: wanted.shape[0]]
        if rows.shape != wanted.shape or rows.dtype != wanted.dtype:
            raise Wrong(f"result {index} is {rows.dtype} {tuple(rows.shape)}, not {wanted.dtype} {tuple(wanted.shape)}")
        if not torch.equal(_bits(rows), _bits(wanted)):
            differing = (_bits(rows) != _bits(wanted)).float().mean().item()
            raise Wrong(f"wrong: result {index} differs from plain torch in {differing:.1e} of its bytes")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def nbytes(*tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def memory_rows(stopwatch: Stopwatch, reps: int, group: int, bandwidth: float) -> Iterator[Row]:
    """Rows of every operation on every matrix of `MATRICES`. bandwidth: TB/s of a copy."""
    for n, k in MATRICES:
        operations = [*_weights(n, k, group, stopwatch.device), *_activations(n, k, stopwatch.device)]
        for who, operation, prepare in operations:
            row = {"section": "quantize", "operation": operation, "who": who, "n": n, "k": k}
            try:
                call, expected, read = prepare()
                result = call()
                result = result if isinstance(result, tuple) else (result,)
                if expected is not None:
                    same(result[: len(expected)], expected)
                moved = nbytes(*read) + nbytes(*result)
                us = stopwatch.microseconds(call, reps)
                tbps = moved / us / 1e6
                row |= {"us": us, "tbps": tbps, "share": tbps / bandwidth}
                del call, result, expected, read
            except ERRORS as error:
                row |= {"skipped": reason(error)}
            yield row
            torch.cuda.empty_cache()


Prepared = tuple[Callable[[], Any], Result | None, tuple[Tensor, ...]]  # the call, its leading rows, what it reads
Operation = tuple[str, str, Callable[[], Prepared]]


def _weights(n: int, k: int, group: int, device: torch.device) -> Iterator[Operation]:
    master = torch.randn(n, k, device=device).mul_(0.02)
    for name, scheme, symmetric in (
        ("w4a16", "w4a16", True),
        ("w4a16 asymmetric", "w4a16", False),
        ("w8a8", "w8a8", True),
        ("fp8", "fp8", True),
    ):
        yield "qarl", f"quantize {name}", partial(_quantize, master, scheme, symmetric, group)
        yield "qarl", f"dequantize {name}", partial(_dequantize, master, scheme, symmetric, group)
    yield "qarl", "quantize fp8_block", partial(_quantize_block, master)
    yield "qarl", "dequantize fp8_block", partial(_dequantize_block, master)
    yield "qarl", "tile w4a16", partial(_tile, master, group)


def _quantize(master: Tensor, scheme: str, symmetric: bool, group: int) -> Prepared:
    from qarl_kernels import quantize

    wanted = quantize_weight(master[:CHECKED], qarl_scheme(scheme, group, symmetric), scheme).tensors
    if scheme != "w4a16":
        run = {"w8a8": quantize.quantize_int8, "fp8": quantize.quantize_fp8}[scheme]
        return lambda: run(master, torch.bfloat16), (wanted["weight"], wanted["weight_scale"]), (master,)
    expected = (wanted["weight_packed"], wanted["weight_scale"])
    if not symmetric:
        expected += (wanted["weight_zero_point"],)
    options = {"symmetric": symmetric, "divisor": 7.5, "lowest": -8, "highest": 7, "scale_dtype": torch.bfloat16}
    return lambda: quantize.quantize_int4(master, group, **options), expected, (master,)


def _dequantize(master: Tensor, scheme: str, symmetric: bool, group: int) -> Prepared:
    from qarl_kernels import dequantize

    kind = qarl_scheme(scheme, group, symmetric)
    stored = quantize_weight(master, kind, scheme).tensors
    expected = (dequantize_weight(quantize_weight(master[:CHECKED], kind, scheme), torch.bfloat16),)
    scale, zero_point = stored["weight_scale"], stored.get("weight_zero_point")
    if scheme == "w4a16":
        packed = stored["weight_packed"]
        read = (packed, scale) if zero_point is None else (packed, scale, zero_point)
        k = master.shape[1]
        return lambda: dequantize.dequantize_int4(packed, scale, zero_point, k, torch.bfloat16), expected, read
    codes = stored["weight"]
    return lambda: dequantize.dequantize_channel(codes, scale, torch.bfloat16), expected, (codes, scale)


def _quantize_block(master: Tensor) -> Prepared:
    from qarl_kernels import quantize

    return lambda: quantize.quantize_fp8_block(master, torch.bfloat16), quantize_blocks(master[:CHECKED]), (master,)


def _dequantize_block(master: Tensor) -> Prepared:
    from qarl_kernels import dequantize

    codes, scale = quantize_blocks(master)
    wide = scale[: CHECKED // BLOCK].float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    expected = ((codes[:CHECKED].float() * wide[:, : codes.shape[1]]).to(torch.bfloat16),)
    return lambda: dequantize.dequantize_fp8_block(codes, scale, torch.bfloat16), expected, (codes, scale)


def _tile(master: Tensor, group: int) -> Prepared:
    from qarl_kernels import tile

    packed = quantize_weight(master, qarl_scheme("w4a16", group), "w4a16").tensors["weight_packed"]
    if not torch.equal(tile.untile_int4(tile.tile_int4(packed, master.shape[1]), *master.shape), packed):
        raise Wrong("wrong: untile_int4 does not undo tile_int4")
    return lambda: tile.tile_int4(packed, master.shape[1]), None, (packed,)


def _activations(m: int, k: int, device: torch.device) -> Iterator[Operation]:
    x = torch.randn(m, k, device=device).to(torch.bfloat16)
    for scheme, kind in (("w8a8", "int8"), ("fp8", "fp8"), ("fp8_block", "fp8 group")):
        yield "qarl", f"activation {kind}", partial(_activation, x, scheme)
        yield "vllm", f"activation {kind}", partial(_vllm_activation, x, scheme)


def _activation(x: Tensor, scheme: str) -> Prepared:
    from qarl_kernels import quantize

    few = x[:CHECKED]
    if scheme == "w8a8":
        return lambda: quantize.activation_int8(x), quantize_activation_int8(few), (x,)
    if scheme == "fp8":
        return lambda: quantize.activation_fp8(x), quantize_activation_fp8(few), (x,)
    codes, scale = quantize_activation_fp8(few.reshape(-1, BLOCK))
    return lambda: quantize.activation_fp8_group(x), (codes.view(few.shape), scale.view(few.shape[0], -1)), (x,)


def _vllm_activation(x: Tensor, scheme: str) -> Prepared:
    quantize = vllm_quantizers()[scheme]
    return lambda: quantize(x), None, (x,)
