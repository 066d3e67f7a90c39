"""Section `quantize`: kernels that are bound by memory, as a share of what a copy reaches.

That they give the bits of plain torch is tested in tests/kernels and tests/quant_formats.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from kernel_bench.measure import ERRORS, Stopwatch, reason
from kernel_bench.peers import vllm_quantizers
from kernel_bench.problems import qarl_scheme
from kernel_bench.shapes import MATRICES
from qarl_formats.registry import scheme_names
from qarl_formats.weight import quantize_weight
from qarl_kernels.quantize import activation_codes
from torch import Tensor

Row = dict[str, Any]
Operation = tuple[Callable[[], Any], list[Tensor]]  # the call, and what it reads
ACTIVATIONS = {"w8a8": "int8", "fp8": "fp8", "fp8_block": "fp8_group"}


def memory_rows(stopwatch: Stopwatch, reps: int, group: int, bandwidth: float) -> Iterator[Row]:
    """Rows of every operation on every matrix of `MATRICES`. bandwidth: TB/s of a copy."""
    for n, k in MATRICES:
        for (who, operation), prepare in operations(n, k, group, stopwatch.device).items():
            row = {"section": "quantize", "operation": operation, "who": who, "n": n, "k": k}
            try:
                call, read = prepare()
                us = stopwatch.microseconds(call, reps)
                tbps = (sum(tensor.nbytes for tensor in read) + written(call())) / us / 1e6
                row |= {"us": us, "tbps": tbps, "share": tbps / bandwidth}
            except ERRORS as error:
                row |= {"skipped": reason(error)}
            yield row
            torch.cuda.empty_cache()


def written(result: Any) -> int:
    """Bytes of a tensor, or of all tensors of a tuple or dict."""
    if isinstance(result, Tensor):
        return result.nbytes
    parts = result.values() if isinstance(result, dict) else result if isinstance(result, tuple) else ()
    return sum(map(written, parts))


def operations(n: int, k: int, group: int, device: torch.device) -> dict[tuple[str, str], Callable[[], Operation]]:
    """By (who, what): quantization and its inverse of a master (n, k), and quantization of activations."""
    master = torch.randn(n, k, device=device).mul_(0.02)
    x = master.bfloat16()

    def quantize(scheme: str) -> Operation:
        kind = qarl_scheme(scheme, group)
        return lambda: kind.quantize(master, kernels=True), [master]

    def dequantize(scheme: str) -> Operation:
        weight = quantize_weight(master, qarl_scheme(scheme, group), scheme)
        return lambda: weight.dequantize(torch.bfloat16, kernels=True), list(weight.tensors.values())

    def vllm_activation(scheme: str) -> Operation:
        call = vllm_quantizers()[scheme]
        return lambda: call(x), [x]

    found: dict[tuple[str, str], Callable[[], Operation]] = {}
    for scheme in scheme_names(lambda kind: kind.weight_bits is not None):
        found["qarl", f"quantize {scheme}"] = partial(quantize, scheme)
        found["qarl", f"dequantize {scheme}"] = partial(dequantize, scheme)
    for scheme, codes in ACTIVATIONS.items():
        found["qarl", f"activation {codes}"] = lambda codes=codes: (partial(activation_codes, x, codes), [x])
        found["vllm", f"activation {codes}"] = partial(vllm_activation, scheme)
    return found
