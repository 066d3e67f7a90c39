"""Sections of matrix products: qarl's kernels beside the peers, each checked before it is timed."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from kernel_bench.measure import Stopwatch, build_all, free_bytes, measured, picked_rows
from kernel_bench.peers import cublas, peer_builders
from kernel_bench.problems import Activations, Maker, Weight, make_activations, make_weight, qarl_maker
from kernel_bench.shapes import Layer
from torch import Tensor

Row = dict[str, Any]


def needed_bytes(n: int, k: int, m: int) -> int:
    """Device memory that one product needs at most, beyond the weight: inputs, results, masks that check them."""
    return 2 * m * n * 4 + m * k * 2


class Products:
    """The products of every scheme with one layer's weight."""

    def __init__(self, stopwatch: Stopwatch, reps: int, group: int) -> None:
        self.stopwatch, self.reps, self.group = stopwatch, reps, group
        self._cublas_us: dict[tuple[int, int, int], Row] = {}

    def rows(self, scheme: str, layer: Layer, many: Sequence[int]) -> Iterator[Row]:
        """One row for every kernel and number of rows; a kernel that did not run has `skipped`, the reason."""
        device = self.stopwatch.device
        base = {"section": scheme, "model": layer.model, "layer": layer.name, "n": layer.n, "k": layer.k}
        if scheme in ("w4a16", "w4a8"):
            base["group"] = self.group
        if free_bytes(device) < 6 * 4 * layer.n * layer.k:  # of a float32 master and its temporaries
            yield base | {"who": "qarl", "m": None, "skipped": "not enough device memory"}
            return
        weight = make_weight(scheme, layer.n, layer.k, self.group, device)
        activations = make_activations(scheme, max(many), layer.k, device)
        builders = {"qarl": partial(qarl_maker, weight, activations), **peer_builders(weight, activations)}
        makers, skipped = build_all(builders)
        yield from (base | {"who": who, "m": None, "skipped": why} for who, why in skipped.items())
        for m in many:
            if free_bytes(device) < needed_bytes(layer.n, layer.k, m):
                yield base | {"who": "qarl", "m": m, "skipped": "not enough device memory"}
                continue
            picked = picked_rows(m, device)
            expected = activations.values(picked) @ weight.values.t()
            nbytes = weight.nbytes + m * (activations.row_bytes() + 2 * weight.n)
            for who, make in makers.items():
                yield base | {"who": who, "m": m} | self._time(make, m, expected, picked, weight, nbytes)
            yield base | {"who": "cublas_bf16", "m": m} | self._cublas(weight, activations, m)

    def _time(self, make: Maker, m: int, expected: Tensor, picked: Tensor, weight: Weight, nbytes: int) -> Row:
        shape = m, weight.n
        row = measured(lambda: make(m), self.stopwatch, self.reps, expected, picked, shape)
        if "us" not in row:
            return row
        us = row["us"]
        # Of the product, and of the least traffic that it can have.
        rates = {"tflops": 2 * m * weight.n * weight.k / us / 1e6, "tbps": nbytes / us / 1e6}
        return row | rates

    def _cublas(self, weight: Weight, activations: Activations, m: int) -> Row:
        """Timed once for a shape: its time does not depend on the scheme."""
        key, nbytes = (weight.n, weight.k, m), 2 * (weight.n * weight.k + m * (weight.k + weight.n))
        if key not in self._cublas_us:
            picked = picked_rows(m, self.stopwatch.device)
            expected = activations.x[picked].float() @ weight.values.to(torch.bfloat16).float().t()
            row = self._time(cublas(weight, activations), m, expected, picked, weight, nbytes)
            if "skipped" in row:
                return row
            self._cublas_us[key] = row
        return self._cublas_us[key]
