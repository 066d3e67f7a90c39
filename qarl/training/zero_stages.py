"""Drives DeepSpeed's ZeRO optimizers (stages 0 to 3) with gradients computed outside of DeepSpeed.

DeepSpeed's module never runs a forward and autograd never sees its parameters, so none of DeepSpeed's hooks fire. Each
gradient is handed to the stage explicitly, with the calls of `DeepSpeedEngine.coalesce_grad_reduction`. Most of them
are private and may change, so the package is pinned to the release that this module was written for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Fragment:
    """Elements [start, start + length) of a flattened master weight, stored at [at, at + length) of a flat tensor."""

    name: str
    start: int
    at: int
    length: int


@dataclass(frozen=True)
class Flat:
    """A tensor that the optimizer treats as one parameter.

    Attributes:
        values: float32, any shape.
        fragments: Parts of master weights that it stores, in order. Gaps between them are padding.
    """

    values: Tensor
    fragments: list[Fragment]


class Stage(ABC):
    """One ZeRO stage on this rank. All methods except `flats` and `owned_flats` are collectives.

    Attributes:
        masters: DeepSpeed's parameters, by the name of the master weight.
        optimizer: The torch optimizer; its state is keyed by the `values` of `flats()`.
        each_round: Reduce the gradients of every round of micro-batches, instead of once at the end.
        replicated: Whether every rank has all gradients.
    """

    each_round: bool
    replicated = False

    def __init__(self, masters: Mapping[str, nn.Parameter], engine: Any, optimizer: torch.optim.Optimizer) -> None:
        self.masters, self.engine, self.optimizer = dict(masters), engine, optimizer
        self.count, self.rank = dist.get_world_size(), dist.get_rank()
        self._names = {parameter: name for name, parameter in masters.items()}  # parameters hash by identity

    def begin(self) -> None:
        """Prepare for the gradients of a round, or of the whole step."""
        return

    def add(self, name: str, gradient: Tensor) -> None:
        """Add this rank's full gradient of a master weight. Call it for all weights, in the same order on all ranks.

        Args:
            name: Name of the master weight.
            gradient: float32, contiguous, with the shape of the master weight. It is overwritten.
        """
        self._add(self.masters[name], gradient.mul_(self.count))  # DeepSpeed averages over ranks; qarl needs the sum

    @abstractmethod
    def _add(self, parameter: nn.Parameter, gradient: Tensor) -> None: ...

    @abstractmethod
    def end(self) -> None:
        """Finish a round after all gradients were added."""

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """Return the gradients that this rank steps with, summed over ranks and rounds. Call it once per step.

        The caller may scale them in place before `step`.
        """

    @abstractmethod
    def step(self) -> None:
        """Run the optimizer and drop the gradients."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Drop the gradients without a step."""

    @abstractmethod
    def flats(self) -> list[Flat]:
        """Return the float32 values that this rank updates."""

    def owned_flats(self) -> list[Flat]:
        """Return `flats`, with fragments restricted so that exactly one rank has each element of a master weight."""
        return self.flats()

    @abstractmethod
    def spread(self) -> None:
        """Call after modifying the values of `flats`, so that `whole` returns them on every rank."""

    def whole(self, name: str) -> Tensor:
        """Return a full master weight; must not be modified."""
        return self.masters[name].detach()


class AllReduce(Stage):
    """Stage 0: nothing is sharded, gradients are all-reduced."""

    each_round = False
    replicated = True

    def _add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        parameter.grad = gradient

    def end(self) -> None:
        self.engine.allreduce_gradients()

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.masters.values() if parameter.grad is not None]

    def step(self) -> None:
        self.optimizer.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def flats(self) -> list[Flat]:
        return [Flat(own, [Fragment(name, 0, 0, own.numel())]) for name, own in self.masters.items()]

    def owned_flats(self) -> list[Flat]:
        found = []
        for flat in self.flats():
            fragment = flat.fragments[0]
            each = -(-fragment.length // self.count)
            start, stop = (min(r * each, fragment.length) for r in (self.rank, self.rank + 1))
            mine = [Fragment(fragment.name, start, start, stop - start)] if stop > start else []
            found.append(replace(flat, fragments=mine))
        return found

    def spread(self) -> None:
        return


class _Zero(Stage):
    """A stage with a ZeRO optimizer of DeepSpeed (`engine.optimizer`), which wraps the torch optimizer."""

    def __init__(self, masters: Mapping[str, nn.Parameter], engine: Any, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(masters, engine, optimizer)
        self._zero = engine.optimizer

    def gradients(self) -> list[Tensor]:
        return [gradient for group in self._zero.averaged_gradients.values() for gradient in group]

    def step(self) -> None:
        self._zero.step()
        if self._zero.overflow:
            raise RuntimeError("DeepSpeed skipped a step although the gradient norm is finite")


class Partitioned(_Zero):
    """Stages 1 and 2: each rank updates its flat partitions, which are copies of parts of its full master weights.

    Args:
        masters, engine, optimizer: See `Stage`.
        each_round: True for stage 2, which keeps only this rank's partition of the gradients.
    """

    def __init__(
        self, masters: Mapping[str, nn.Parameter], engine: Any, optimizer: torch.optim.Optimizer, each_round: bool
    ) -> None:
        super().__init__(masters, engine, optimizer)
        self.each_round = each_round
        self._group_of = {p: i for i, group in enumerate(self._zero.bit16_groups) for p in group}

    def begin(self) -> None:
        self._zero.set_gradient_accumulation_boundary(not self.each_round)
        self._zero.clear_backward_seen_flag()
        self._zero.setup_buckets()

    def _add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        parameter.grad = gradient
        self._zero.reduce_ready_partitions_and_remove_grads(parameter, self._group_of[parameter])

    def end(self) -> None:
        self._zero.overlapping_partition_gradients_reduce_epilogue()

    def gradients(self) -> list[Tensor]:
        if self.each_round:
            self._zero.finalize_gradient_accumulation_boundary()
        return super().gradients()

    def drop_gradients(self) -> None:
        for group in self._zero.averaged_gradients:
            self._zero.averaged_gradients[group] = None
        for group in self._zero.all_grad_tensors:
            self._zero.all_grad_tensors[group] = None
        self._zero.zero_grad()
        self._zero.micro_step_id = -1

    def flats(self) -> list[Flat]:
        zero, found = self._zero, []
        for i, values in enumerate(zero.single_partition_of_fp32_groups):
            size = int(zero.partition_size[i])
            low, fragments = self.rank * size, []
            for parameter, offset in zip(
                zero.round_robin_bit16_groups[i], zero.round_robin_bit16_offsets[i], strict=True
            ):
                start, stop = max(offset, low), min(offset + parameter.numel(), low + size)
                if start < stop:
                    fragments.append(Fragment(self._names[parameter], start - offset, start - low, stop - start))
            found.append(Flat(values, fragments))
        return found

    def spread(self) -> None:
        self._zero.update_lp_params()


class Sharded(_Zero):
    """Stage 3: each rank keeps only its flat shard of each master weight. `whole` gathers one master weight."""

    each_round = True

    def begin(self) -> None:
        self._zero.clear_backward_seen_flag()

    def _add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        shard = parameter.data
        # A gradient must have the shape of its parameter, but a sharded parameter's data is empty.
        parameter.data = gradient.new_empty(1).expand(gradient.shape)
        parameter.grad = gradient
        parameter.data = shard
        self._zero.reduce_ready_partitions_and_remove_grads(parameter)

    def end(self) -> None:
        self._zero.independent_gradient_partition_epilogue()

    def drop_gradients(self) -> None:
        self._zero.averaged_gradients = {}
        self._zero.zero_grad()

    def flats(self) -> list[Flat]:
        found = []
        for values, members in zip(self._zero.fp32_partitioned_groups_flat, self._zero.fp16_groups, strict=True):
            at, fragments = 0, []
            for parameter in members:
                size = parameter.partition_numel()
                start, stop = (min(r * size, parameter.ds_numel) for r in (self.rank, self.rank + 1))
                if start < stop:
                    fragments.append(Fragment(self._names[parameter], start, at, stop - start))
                at += size
            found.append(Flat(values, fragments))
        return found

    def spread(self) -> None:
        for group in range(len(self._zero.fp16_groups)):
            self._zero._reassign_or_swap_out_partitioned_parameters(group)  # DeepSpeed updates a copy of the shards

    def whole(self, name: str) -> Tensor:
        from deepspeed import zero

        with zero.GatheredParameters([self.masters[name]]):
            return self.masters[name].detach().clone()
