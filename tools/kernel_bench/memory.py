"""Section `quantize`: kernels that are bound by memory, as a share of what a copy reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from qarl_formats.registry import scheme_names
from qarl_formats.weight import quantize_weight
from qarl_kernels.activation import quantize_activation_fp8, quantize_activation_int8
from torch import Tensor

from kernel_bench.measure import Stopwatch, Wrong
from kernel_bench.peers import ERRORS, reason, vllm_quantizers
from kernel_bench.problems import qarl_scheme
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
    kinds = [(name, True) for name in scheme_names(lambda kind: kind.weight_bits is not None)]
    for scheme, symmetric in [*kinds, *((name, False) for name in scheme_names(lambda kind: kind.zero_points))]:
        name = scheme if symmetric else f"{scheme} asymmetric"
        yield "qarl", f"quantize {name}", partial(_quantize, master, scheme, symmetric, group)
        yield "qarl", f"dequantize {name}", partial(_dequantize, master, scheme, symmetric, group)
    yield "qarl", "tile w4a16", partial(_tile, master, group)


def _quantize(master: Tensor, scheme: str, symmetric: bool, group: int) -> Prepared:
    kind = qarl_scheme(scheme, group, symmetric)
    wanted = quantize_weight(master[:CHECKED], kind, scheme).tensors
    expected = tuple(tensor for suffix, tensor in wanted.items() if suffix != "weight_shape")

    def call() -> Result:
        tensors, _ = kind.quantize(master, kernels=True)
        return tuple(tensor for suffix, tensor in tensors.items() if suffix != "weight_shape")

    return call, expected, (master,)


def _dequantize(master: Tensor, scheme: str, symmetric: bool, group: int) -> Prepared:
    kind = qarl_scheme(scheme, group, symmetric)
    weight = quantize_weight(master, kind, scheme)
    expected = (quantize_weight(master[:CHECKED], kind, scheme).dequantize(torch.bfloat16),)
    read = tuple(tensor for suffix, tensor in weight.tensors.items() if suffix != "weight_shape")
    return lambda: weight.dequantize(torch.bfloat16, kernels=True), expected, read


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
        return lambda: quantize.activation_codes(x, "int8"), quantize_activation_int8(few), (x,)
    if scheme == "fp8":
        return lambda: quantize.activation_codes(x, "fp8"), quantize_activation_fp8(few), (x,)
    codes, scale = quantize_activation_fp8(few.reshape(-1, BLOCK))
    return (
        lambda: quantize.activation_codes(x, "fp8_group"),
        (codes.view(few.shape), scale.view(few.shape[0], -1)),
        (x,),
    )


def _vllm_activation(x: Tensor, scheme: str) -> Prepared:
    quantize = vllm_quantizers()[scheme]
    return lambda: quantize(x), None, (x,)
