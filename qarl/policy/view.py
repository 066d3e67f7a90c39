"""Whose forward is running, and on which tensors: learner, sampler, shadow and reference share one set of modules.

    learner    the masters of the current version, as `quant.learner` and `model.learner_dtype` have them
    sampler    the published version, in the sampler's arithmetic
    shadow     the current version, in the sampler's arithmetic
    reference  the version that was kept, as the learner ran it

The modules hold masters alone. What a forward multiplies stands in a `View`, and the policy's `Role` says which one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from qarl_formats.weight import LowBitWeight

    from qarl.policy.projection import Projection


@dataclass(frozen=True)
class View:
    """The parameters of one version as one kind of forward reads them. Views share the tensors that are the same.

    operands: of the linears, by module name, for layers in plain torch. projections: the same for layers of Triton
    kernels, by the names of the modules that are multiplied as one; a view has one or the other. values: all other
    parameters by their own name (norms, embedding, biases, output layer), in the compute dtype. head: (V, H), the
    output layer as `qarl_kernels.logprob.logits_of` takes it. kv_fp8: attention sees keys and values rounded to e4m3,
    see `quant.kv_cache_dtype`.
    """

    operands: Mapping[str, LowBitWeight]
    values: Mapping[str, Tensor]
    head: Tensor
    projections: Mapping[tuple[str, ...], Projection] = field(default_factory=dict)
    kv_fp8: bool = False

    @property
    def fused(self) -> bool:
        """Whether its forward runs on layers of Triton kernels."""
        return bool(self.projections)

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What a KV cache of a forward in `dtype` holds: plain torch keeps e4m3 values in that."""
        return torch.float8_e4m3fn if self.kv_fp8 and self.fused else dtype

    def multiplied(self) -> Iterator[tuple[tuple[str, ...], tuple[int, ...], LowBitWeight]]:
        """Every operand, with the modules whose weights it holds and their output features, in order."""
        for name, operand in self.operands.items():
            yield (name,), (operand.shape[0],), operand
        for projection in self.projections.values():
            yield from projection.multiplied()


class Role:
    """Which view a forward reads: one object shared by a policy's modules."""

    def __init__(self, view: View | None = None) -> None:
        self._view = view

    @property
    def view(self) -> View:
        assert self._view is not None, "a forward ran before a snapshot was installed"
        return self._view

    def settle(self, view: View) -> None:
        """`view` is what forwards read from now on, where no `as_` says otherwise."""
        self._view = view

    @contextmanager
    def as_(self, view: View) -> Iterator[None]:
        """Inside, forwards read `view`."""
        before, self._view = self._view, view
        try:
            yield
        finally:
            self._view = before
