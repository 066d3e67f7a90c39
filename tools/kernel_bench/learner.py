"""Section `learner`: forward and backward of a linear layer on a batch of tokens, and where their time goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kernel_bench.measure import Stopwatch, free_bytes
from kernel_bench.peers import ERRORS, reason
from kernel_bench.problems import Weight, make_weight
from kernel_bench.shapes import LEARNER_ROWS, Layer

Row = dict[str, Any]
SCHEMES = ("dense", "w4a16", "w8a8", "fp8")
PARTS = ("forward", "dequantize", "input_grad", "weight_grad")


def learner_rows(stopwatch: Stopwatch, reps: int, group: int, layer: Layer, m: int = LEARNER_ROWS) -> Iterator[Row]:
    """torch.nn.Linear in bf16, then qarl's parts in every scheme, for m tokens.

    The peer's gradient of the weight is bf16 and added to one that is there, as a training step's later micro-batches
    do; qarl's is float32.
    """
    n, k, device = layer.n, layer.k, stopwatch.device
    base = {"section": "learner", "model": layer.model, "layer": layer.name, "n": n, "k": k, "m": m}
    needed = 24 * n * k + 2 * m * (2 * k + 3 * n) + 4 * n * k
    if free_bytes(device) < needed:
        yield base | {"who": "qarl", "scheme": "all", "part": "total", "skipped": "not enough device memory"}
        return
    x = torch.randn(m, k, device=device).to(torch.bfloat16)
    dy = torch.randn(m, n, device=device).to(torch.bfloat16).mul_(1e-3)
    flops = 2 * m * n * k
    for part, us in _linear(stopwatch, reps, x, dy).items():
        tflops = (3 if part == "total" else 1) * flops / us / 1e6
        yield base | {"who": "nn.Linear", "scheme": "bf16", "part": part, "us": us, "tflops": tflops}
    for scheme in SCHEMES:
        try:
            parts = _qarl(stopwatch, reps, make_weight(scheme, n, k, group, device), x, dy)
        except ERRORS as error:
            yield base | {"who": "qarl", "scheme": scheme, "part": "total", "skipped": reason(error)}
            continue
        for part, us in (parts | {"total": sum(parts.values())}).items():
            row = base | {"who": "qarl", "scheme": scheme, "part": part, "us": us}
            yield row if part == "dequantize" else row | {"tflops": (3 if part == "total" else 1) * flops / us / 1e6}
        torch.cuda.empty_cache()


def _linear(stopwatch: Stopwatch, reps: int, x: Tensor, dy: Tensor) -> dict[str, float]:
    """torch.nn.Linear: its forward, and forward and backward together, through autograd."""
    linear = torch.nn.Linear(x.shape[1], dy.shape[1], bias=False, device=x.device, dtype=x.dtype)
    x = x.detach().requires_grad_()

    def step() -> None:
        x.grad = None
        linear(x).backward(dy)

    def forward() -> Tensor:
        with torch.no_grad():
            return linear(x)

    step()  # so that later ones add to a gradient that is there
    return {"forward": stopwatch.microseconds(forward, reps), "total": stopwatch.microseconds(step, reps)}


def _qarl(stopwatch: Stopwatch, reps: int, weight: Weight, x: Tensor, dy: Tensor) -> dict[str, float]:
    """Microseconds of each of `PARTS` (dense has no `dequantize`); the forward quantizes its activations."""
    from qarl_kernels import backward, dequantize

    forward = _forward(weight, x)
    stored, bf16 = weight.tensors, torch.bfloat16
    parts = {"forward": stopwatch.microseconds(forward, reps)}
    if weight.scheme == "dense":
        values = stored["weight"]
    else:

        def restore() -> Tensor:
            if weight.scheme == "w4a16":
                return dequantize.dequantize_int4(stored["weight_packed"], stored["weight_scale"], None, weight.k, bf16)
            return dequantize.dequantize_bytes(stored["weight"], stored["weight_scale"], bf16)

        values = restore()
        parts["dequantize"] = stopwatch.microseconds(restore, reps)
    gradient = torch.zeros(weight.n, weight.k, device=x.device)
    parts["input_grad"] = stopwatch.microseconds(lambda: backward.input_grad(dy, values), reps)
    parts["weight_grad"] = stopwatch.microseconds(lambda: backward.weight_grad(dy, x, into=gradient), reps)
    return parts


def _forward(weight: Weight, x: Tensor) -> Callable[[], Tensor]:
    from qarl_kernels import gemm, quantize, w4a16

    stored = weight.tensors
    if weight.scheme == "dense":
        return lambda: gemm.dense(x, stored["weight"])
    if weight.scheme == "w4a16":
        return lambda: w4a16.w4a16(x, stored["weight_packed"], stored["weight_scale"], None, None, None, None)
    kind = "int8" if weight.scheme == "w8a8" else "fp8"
    return lambda: gemm.scaled(
        *quantize.activation_codes(x, kind), stored["weight"], stored["weight_scale"], None, torch.bfloat16
    )
