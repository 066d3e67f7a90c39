"""What a rank measures: whether results are exact, sums of gradients, products beside them, gathers of codes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from model_sizes import Shape
from qarl_formats.registry import make_scheme
from qarl_formats.scheme import Scheme
from step_bench.measure import timed
from torch import Tensor

from qarl.distributed.codes import gather_codes
from qarl.distributed.exchange import GroupExchange
from qarl.distributed.rows import RowPlan, row_unit, stacked_experts
from qarl.fused import shared_scales
from qarl.weight_sync.quantize import Quantizer, quantize_parameters
from ranks_bench.shapes import SHAPES, Shapes, head_shapes, layer_shapes, model_shapes

Record = dict[str, Any]
CHECKED = ("bf16", "w4a16", "fp8", "nvfp4a16")
IN_FLIGHT = 2  # layers whose sums are under way, as in training
WARMUP = 2  # calls before those that are timed
_reduce_scatter = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)  # its name up to torch 2.12
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Bench:
    """One rank. layer_products: matrix products of a layer in `overlap`."""

    def __init__(
        self, exchange: GroupExchange, group: dist.ProcessGroup, shape: Shape, iterations: int, layer_products: int
    ) -> None:
        self.exchange, self.group, self.shape, self.device = exchange, group, shape, exchange.device
        self.iterations, self.layer_products = iterations, layer_products

    def timed(self, call: Callable[[], object]) -> Record:
        return timed(call, self.device, WARMUP, self.iterations, prepare=lambda: dist.barrier(self.group))

    def random(self, shapes: Shapes, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator(self.device).manual_seed(seed)
        return {
            name: torch.randn(size, device=self.device, generator=generator).mul_(0.02) for name, size in shapes.items()
        }

    def plan(self, shapes: Shapes, scheme: Scheme | None) -> RowPlan:
        stacks = stacked_experts(shapes, lambda name: scheme_of(scheme, name))
        return RowPlan(shapes, lambda name: row_unit(scheme_of(scheme, name)), self.exchange.count, stacks)

    # --- results

    def check(self) -> Iterator[Record]:
        """Sums and codes against one process, to the bit, on odd shapes."""
        shapes = layer_shapes(SHAPES["tiny"], 0) | {"model.layers.0.mlp.up_proj.weight": (130, 64), "odd": (7, 5)}
        shapes |= layer_shapes(replace(SHAPES["tiny-moe"], experts=3), 1)  # a cut goes through the second one
        rank, count = self.exchange.rank, self.exchange.count
        parts = [list(self.random(shapes, seed).values()) for seed in range(count)]
        cuts = [self.plan(shapes, None).cut(name) for name in shapes]
        wrong = 0
        for pending, cut, *some in zip(self.exchange.begin_sums(parts[rank], cuts), cuts, *parts, strict=True):
            total = some[0].clone()
            for part in some[1:]:
                total += part
            wrong += not torch.equal(pending.rows(), total[cut[rank].start : cut[rank].stop])
        yield {"part": "check", "what": "sums in the order of ranks", "wrong_tensors": wrong}
        for name in CHECKED:
            scheme, masters = made(name, 32), self.random(shapes, 1)
            plan = self.plan(shapes, scheme)
            rows = {key: plan.cut(key)[rank] for key in masters}
            shards = {key: master[rows[key].start : rows[key].stop].clone() for key, master in masters.items()}
            of, kernels = (lambda key, scheme=scheme: scheme_of(scheme, key)), self.device.type == "cuda"
            found = gather_codes(shards, plan, self.exchange, of, torch.bfloat16, 1, kernels)
            modules = [key.removesuffix(".weight") for key in masters if of(key)]
            shared = {} if scheme is None else shared_scales(modules, scheme, masters.__getitem__)
            expected = quantize_parameters(masters, of, torch.bfloat16, 1, kernels, shared)
            equal = found.manifest().digest() == expected.manifest().digest()
            yield {"part": "check", "what": f"codes of {name}", "wrong_tensors": 0 if equal else 1}

    # --- gradients

    def sum(self) -> Iterator[Record]:
        """A layer's gradients, and the largest matrix alone, beside the backend's reduce-scatter of the same bytes."""
        table = {"model.embed_tokens.weight": head_shapes(self.shape)["model.embed_tokens.weight"]}
        for what, shapes in (("a layer", layer_shapes(self.shape, 0)), ("embedding", table)):
            tensors, cuts = self._gradients(shapes)
            received = sum(tensor.nbytes for tensor in tensors) * (self.exchange.count - 1) / self.exchange.count
            ways: dict[str, Callable[[], object]] = {
                "rows in order, one message": lambda t=tensors, c=cuts: self._add(t, c),
                "rows in order, a message each": lambda t=tensors, c=cuts: [
                    self.exchange.begin_sum(*pair).rows() for pair in zip(t, c, strict=True)
                ],
                "reduce_scatter": lambda t=tensors: self._reduce_scatter(t),
            }
            if any(len(tensor) % self.exchange.count for tensor in tensors):
                del ways["reduce_scatter"]
            for way, call in ways.items():
                found = self.timed(call)
                speed = {"received_bytes": received, "received_gb_per_s": 1e-9 * received / found["seconds"]}
                yield {"part": "sum", "what": what, "way": way} | found | speed

    def _gradients(self, shapes: Shapes) -> tuple[list[Tensor], list[list[range]]]:
        """Tensors as a backward sends them, and their cuts."""
        plan = self.plan(shapes, None)
        sizes = {block[0]: plan.block_shape(block) for block in plan.blocks}
        return list(self.random(sizes, self.exchange.rank).values()), [plan.block_cut(block) for block in plan.blocks]

    def _add(self, tensors: list[Tensor], cuts: list[list[range]]) -> None:
        for pending in self.exchange.begin_sums(tensors, cuts):
            pending.rows()

    def _reduce_scatter(self, tensors: list[Tensor]) -> None:
        works = []
        for tensor in tensors:
            out = tensor.new_empty(len(tensor) // self.exchange.count, *tensor.shape[1:])
            works.append((_reduce_scatter(out, tensor, group=self.group, async_op=True), out))
        for work, _ in works:
            work.wait()

    def overlap(self) -> Iterator[Record]:
        """Four layers of matrix products alone, their sums alone, and both at once, two layers' sums under way."""
        shapes = layer_shapes(self.shape, 0)
        tensors, cuts = self._gradients(shapes)
        on_gpu = self.device.type == "cuda"
        x = torch.randn(16_384 if on_gpu else 64, self.shape.hidden, device=self.device).bfloat16()
        weight = torch.randn(self.shape.hidden, self.shape.inner, device=self.device).bfloat16()

        def run(products: bool, sums: bool) -> None:
            flight: deque[Any] = deque()
            for _ in range(4):
                for _ in range(self.layer_products if products else 0):
                    torch.mm(x, weight)
                if sums:
                    flight.append(self.exchange.begin_sums(tensors, cuts))
                while len(flight) > IN_FLIGHT:
                    [pending.rows() for pending in flight.popleft()]
            for some in flight:
                [pending.rows() for pending in some]

        for what, products, sums in (
            ("products", True, False),
            ("sums", False, True),
            ("products and sums", True, True),
        ):
            yield {"part": "overlap", "what": what} | self.timed(lambda p=products, s=sums: run(p, s))

    # --- codes

    def gather(self, schemes: list[str]) -> Iterator[Record]:
        """A version's codes of the whole model, beside one pass of ZeRO-3's gathers of its 16-bit weights."""
        shapes, kernels = model_shapes(self.shape), self.device.type == "cuda"
        plain = sum(2 * math.prod(size) for size in shapes.values())
        received = plain * (self.exchange.count - 1) / self.exchange.count
        found = self.timed(self._weights)
        yield {"part": "gather", "what": "16-bit weights, a layer at a time"} | found | {"received_bytes": received}
        for name in schemes:
            record = self._codes(made(name, self.shape.group_size), shapes, kernels)
            # each micro-batch gathers the weights in its forward and in its backward
            record["plain_over_codes_bytes_a_micro_batch"] = 2 * received / record["received_bytes"]
            yield {"part": "gather", "what": f"codes of {name}"} | record

    def _codes(self, scheme: Scheme | None, shapes: Shapes, kernels: bool) -> Record:
        plan, rank = self.plan(shapes, scheme), self.exchange.rank
        shards = self.random({key: (len(plan.cut(key)[rank]), *size[1:]) for key, size in shapes.items()}, rank)

        def of(name: str) -> Scheme | None:
            return scheme_of(scheme, name)

        def quantize() -> None:
            quantizer = Quantizer(torch.bfloat16, 1, kernels)
            for key, shard in shards.items():
                if len(shard):
                    quantizer.quantize(key, shard, of(key), None)

        def gather() -> None:
            gather_codes(shards, plan, self.exchange, of, torch.bfloat16, 1, kernels)

        alone = self.timed(quantize)
        before = self.exchange.received["codes"]
        gather()
        moved = self.exchange.received["codes"] - before
        return self.timed(gather) | {"quantize_seconds": alone["seconds"], "received_bytes": moved}

    def _weights(self) -> None:
        """All parameters, a message a layer, whose weights go before the next ones come."""
        groups = [head_shapes(self.shape), *(layer_shapes(self.shape, layer) for layer in range(self.shape.layers))]
        for group in groups:
            size = -(-sum(math.prod(shape) for shape in group.values()) // self.exchange.count)
            own = torch.empty(size, dtype=torch.bfloat16, device=self.device)
            _all_gather(own.new_empty(size * self.exchange.count), own, group=self.group)


def made(name: str, group_size: int) -> Scheme | None:
    scheme = make_scheme(name, group_size if name.startswith("w4") else None)
    return scheme if scheme.quantized else None


def scheme_of(scheme: Scheme | None, name: str) -> Scheme | None:
    return scheme if name.endswith("_proj.weight") else None
