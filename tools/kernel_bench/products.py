"""Sections of matrix products: qarl's kernels beside the peers, each checked before it is timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_bench.measure import Stopwatch, check, free_bytes, picked_rows, poison
from kernel_bench.peers import ERRORS, cublas, peer_builders, reason
from kernel_bench.problems import Activations, Maker, Weight, make_activations, make_weight, qarl_makers
from kernel_bench.shapes import Layer, repetitions

Row = dict[str, Any]


def needed_bytes(n: int, k: int, m: int) -> int:
    """Device memory that one product may need at most, beyond the weight: operands, results, what checks them."""
    outputs = 2 * m * n * 4  # a bf16 result, an int32 or float32 one, their masks
    inputs = m * k * 2
    return outputs + inputs


def weight_bytes_needed(n: int, k: int) -> int:
    """Device memory at most while a weight is made and repacked: a float32 master and its temporaries."""
    return 6 * 4 * n * k


class Products:
    """The products of every scheme with one layer's weight."""

    def __init__(self, stopwatch: Stopwatch, reps: int, group: int) -> None:
        self.stopwatch, self.reps, self.group = stopwatch, reps, group
        self._cublas_us: dict[tuple[int, int, int], float] = {}

    def rows(self, scheme: str, layer: Layer, many: Sequence[int]) -> Iterator[Row]:
        """One row for every kernel and number of rows; a kernel that did not run has `skipped`, the reason."""
        device = self.stopwatch.device
        base = {"section": scheme, "model": layer.model, "layer": layer.name, "n": layer.n, "k": layer.k}
        if scheme in ("w4a16", "w4a8"):
            base["group"] = self.group
        if free_bytes(device) < weight_bytes_needed(layer.n, layer.k):
            yield base | {"who": "qarl", "kind": "gemm", "m": None, "skipped": "not enough device memory"}
            return
        weight = make_weight(scheme, layer.n, layer.k, self.group, device)
        activations = make_activations(scheme, max(many), layer.k, device)
        makers, absent = self._makers(weight, activations)
        for who, kind, why in absent:
            yield base | {"who": who, "kind": kind, "m": None, "skipped": why}
        for m in many:
            if free_bytes(device) < needed_bytes(layer.n, layer.k, m):
                yield base | {"who": "qarl", "kind": "gemm", "m": m, "skipped": "not enough device memory"}
                continue
            picked = picked_rows(m, device)
            expected = activations.values(picked) @ weight.values.t()
            for kind, who, make in makers:
                yield (
                    base
                    | {"who": who, "kind": kind, "m": m}
                    | self._time(make, m, expected, picked, weight, self._bytes(who, kind, weight, activations, m))
                )
            yield base | {"who": "cublas_bf16", "kind": "gemm", "m": m} | self._cublas(weight, activations, m)

    def _makers(
        self, weight: Weight, activations: Activations
    ) -> tuple[list[tuple[str, str, Maker]], list[tuple[str, str, str]]]:
        """(kind, who, maker) of all that could be built, and (who, kind, reason) of what could not."""
        ready: list[tuple[str, str, Maker]] = []
        absent: list[tuple[str, str, str]] = []
        try:
            for kind, makers in zip(("gemm", "end_to_end"), qarl_makers(weight, activations), strict=True):
                ready += [(kind, who, make) for who, make in makers.items()]
        except ERRORS as error:
            absent.append(("qarl", "gemm", reason(error)))
        for kind, builders in zip(("gemm", "end_to_end"), peer_builders(weight, activations), strict=True):
            for who, build in builders.items():
                try:
                    ready.append((kind, who, build()))
                except ERRORS as error:
                    absent.append((who, kind, reason(error)))
        return ready, absent

    def _time(self, make: Maker, m: int, expected: Tensor, picked: Tensor, weight: Weight, nbytes: int) -> Row:
        shape = (m, weight.n)
        try:
            candidate = make(m)
            poison(m, weight.n, self.stopwatch.device)
            error = check(candidate.finish(candidate.call()), expected, picked, shape)
            us = self.stopwatch.microseconds(candidate.call, repetitions(self.reps, m))
        except ERRORS as failure:  # ours are reported in the same way: one shape must not end the run
            return {"skipped": reason(failure)}
        return {"us": us, "error": error} | rates(us, m, weight.n, weight.k, nbytes)

    def _bytes(self, who: str, kind: str, weight: Weight, activations: Activations, m: int) -> int:
        read = 2 * weight.k if kind == "end_to_end" else activations.row_bytes()
        return weight.nbytes + m * (read + 2 * weight.n)

    def _cublas(self, weight: Weight, activations: Activations, m: int) -> Row:
        """Timed once for a shape: its time does not depend on the scheme."""
        key, nbytes = (weight.n, weight.k, m), 2 * (weight.n * weight.k + m * (weight.k + weight.n))
        us = self._cublas_us.get(key)
        if us is not None:
            return {"us": us} | rates(us, m, weight.n, weight.k, nbytes)
        make = cublas(weight, activations)
        picked = picked_rows(m, self.stopwatch.device)
        values = weight.values.to(torch.bfloat16).float()
        row = self._time(make, m, activations.x[picked].float() @ values.t(), picked, weight, nbytes)
        if "us" in row:
            self._cublas_us[key] = row["us"]
        return row


def rates(us: float, m: int, n: int, k: int, nbytes: int) -> dict[str, float]:
    """TFLOP/s of the product and TB/s of the least traffic it can have."""
    return {"tflops": 2 * m * n * k / us / 1e6, "tbps": nbytes / us / 1e6}
