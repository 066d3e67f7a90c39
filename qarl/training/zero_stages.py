"""DeepSpeed's ZeRO optimizers over gradients that are put into place by hand: stages 0 to 3, each with its calls.

No forward of DeepSpeed's module ever runs and autograd never sees its parameters, so no hook of DeepSpeed fires: a
stage is told of each gradient here. The calls are those of `DeepSpeedEngine.coalesce_grad_reduction`, most of them of
names that the next release may change; the package is pinned to the one that they were read in.
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
    """Elements [start, start + length) of a flattened master, which are [at, at + length) of a flat tensor."""

    name: str
    start: int
    at: int
    length: int


@dataclass(frozen=True)
class Flat:
    """What the optimizer has as one parameter. values: float32, any shape. fragments: of masters, in order, which leave
    out what only fills it up."""

    values: Tensor
    fragments: list[Fragment]


class Stage(ABC):
    """One stage of ZeRO on this rank. All methods but `flats` and `held` are collectives.

    optimizer: torch's, whose state is keyed by the `values` of `flats()`. each_round: whether a micro-batch's gradients
    are reduced at once, instead of their sums at the end. replicated: whether every rank has all gradients. masters:
    DeepSpeed's parameters, by the masters' names.
    """

    each_round: bool
    replicated = False

    def __init__(self, masters: Mapping[str, nn.Parameter], engine: Any, optimizer: torch.optim.Optimizer) -> None:
        self.masters, self.engine, self.optimizer = dict(masters), engine, optimizer
        self.count, self.rank = dist.get_world_size(), dist.get_rank()
        self._names = {parameter: name for name, parameter in masters.items()}  # a hash is its identity

    def begin(self) -> None:
        """Gradients of a round, or of all of them together, come now."""
        return

    def add(self, name: str, gradient: Tensor) -> None:
        """This rank's, whole and contiguous, which may be overwritten; of all masters, in one order on all ranks."""
        self._add(self.masters[name], gradient.mul_(self.count))  # DeepSpeed averages

    @abstractmethod
    def _add(self, parameter: nn.Parameter, gradient: Tensor) -> None: ...

    @abstractmethod
    def end(self) -> None:
        """All gradients of the round were added."""

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """What this rank steps with, to be scaled in place: sums over ranks and rounds. Asked for once a step."""

    @abstractmethod
    def step(self) -> None:
        """Step by the gradients, and forget them. Parameters may not be what `flats` says, until `spread`."""

    @abstractmethod
    def forget(self) -> None:
        """Drop the gradients without a step."""

    @abstractmethod
    def flats(self) -> list[Flat]:
        """The float32 values that this rank steps."""

    def held(self) -> list[Flat]:
        """`flats`, cut so that each element of a master is one rank's."""
        return self.flats()

    @abstractmethod
    def spread(self) -> None:
        """The flats' values were changed: let every rank's `whole` have them."""

    def whole(self, name: str) -> Tensor:
        """All of a master; not to be changed."""
        return self.masters[name].detach()


class AllReduce(Stage):
    """Stage 0: nothing is cut, gradients are all-reduced."""

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
        self.forget()

    def forget(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def flats(self) -> list[Flat]:
        return [Flat(own, [Fragment(name, 0, 0, own.numel())]) for name, own in self.masters.items()]

    def held(self) -> list[Flat]:
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


class Partitioned(Stage):
    """Stages 1 and 2: flat partitions of the masters of a group of the optimizer, clones of what every rank has whole.

    each_round: stage 2, which keeps its partition of the gradients alone.
    """

    def __init__(
        self, masters: Mapping[str, nn.Parameter], engine: Any, optimizer: torch.optim.Optimizer, each_round: bool
    ) -> None:
        super().__init__(masters, engine, optimizer)
        self.each_round = each_round
        self._zero = engine.optimizer
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
        return [gradient for group in self._zero.averaged_gradients.values() for gradient in group]

    def step(self) -> None:
        _step(self._zero)

    def forget(self) -> None:
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


class Sharded(Stage):
    """Stage 3: flat parts of each master, and nothing whole; `whole` gathers one."""

    each_round = True

    def __init__(self, masters: Mapping[str, nn.Parameter], engine: Any, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(masters, engine, optimizer)
        self._zero = engine.optimizer

    def begin(self) -> None:
        self._zero.clear_backward_seen_flag()

    def _add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        held = parameter.data
        # A parameter takes only gradients of its shape, and what is there of one that is cut has none.
        parameter.data = gradient.new_empty(1).expand(gradient.shape)
        parameter.grad = gradient
        parameter.data = held
        self._zero.reduce_ready_partitions_and_remove_grads(parameter)

    def end(self) -> None:
        self._zero.independent_gradient_partition_epilogue()

    def gradients(self) -> list[Tensor]:
        return [gradient for group in self._zero.averaged_gradients.values() for gradient in group]

    def step(self) -> None:
        _step(self._zero)

    def forget(self) -> None:
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
            self._zero._reassign_or_swap_out_partitioned_parameters(group)  # DeepSpeed steps a copy of the parts

    def whole(self, name: str) -> Tensor:
        from deepspeed import zero

        with zero.GatheredParameters([self.masters[name]]):
            return self.masters[name].detach().clone()


def _step(zero: Any) -> None:
    zero.step()
    if zero.overflow:
        raise RuntimeError("DeepSpeed left out a step by gradients whose norm is finite")
