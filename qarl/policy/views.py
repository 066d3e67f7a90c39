"""From a snapshot and the masters to the views that forwards read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from qarl_formats.rows import concatenate_rows
from qarl_formats.weight import LowBitWeight, concatenate, ordinary_weight
from torch import Tensor

from qarl.config import QuantConfig
from qarl.errors import UserError
from qarl.policy.projection import Projection, Stack
from qarl.policy.view import View
from qarl.weight_sync.snapshot import Snapshot, quantize_parameter

NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ViewMaker:
    """Makes the views of one policy.

    parameters: the masters, or their values, by name; stacks: the linears that multiply, those of one input together;
    head: the output layer's name. dtype: of what is published; learner_dtype: of the learner's forward. kernels: see
    `LowBitWeight.prepare`.
    """

    parameters: Mapping[str, Tensor]
    stacks: list[Stack]
    head: str
    quant: QuantConfig
    dtype: torch.dtype
    learner_dtype: torch.dtype
    kernels: bool

    def learner(self, snapshot: Snapshot, values: Mapping[str, Tensor] | None = None) -> View:
        """The learner's view of a snapshot just made from the masters. values: see `Policy.take`.

        In the published dtype it shares the snapshot's tensors; in another one it reads the masters, rounded to that.
        """
        return self._learner(snapshot) if values is None else replace(self, parameters=values)._learner(snapshot)

    def _learner(self, snapshot: Snapshot) -> View:
        rounds = self._kv_fp8 and self.quant.learner != "full_precision"
        if self.learner_dtype == self.dtype:
            values = {name: snapshot.tensors[name] for name in self._unquantized()}
        else:
            values = {name: self._rounded(name, snapshot.version) for name in self._unquantized()}
        if self.kernels and self.learner_dtype in NARROW:
            operands = {s.names: self._learner_operands(s.names, snapshot) for s in self.stacks}
            return self._fused(values, operands, rounds)
        plain = {name: self._learner_operands((name,), snapshot)[0] for name in self._linears()}
        return View(plain, values, self._head(values), kv_fp8=rounds)

    def sampling(self, snapshot: Snapshot, learner: View) -> View:
        """A snapshot in the sampler's arithmetic. learner: its learner's view, for what the two have in common."""
        shared = self.learner_dtype == self.dtype
        values = learner.values if shared else {name: snapshot.tensors[name] for name in self._unquantized()}
        if self.kernels:
            operands = {s.names: self._published(s.names, snapshot) for s in self.stacks}
            return self._fused(values, operands, self._kv_fp8)
        plain = {name: self._published((name,), snapshot)[0] for name in self._linears()}
        head = learner.head if shared else self._head(values)
        return View(plain, values, head, kv_fp8=self._kv_fp8)

    @property
    def _kv_fp8(self) -> bool:
        return self.quant.kv_cache_dtype == "fp8"

    def _fused(
        self, values: Mapping[str, Tensor], operands: Mapping[tuple[str, ...], tuple[LowBitWeight, ...]], kv_fp8: bool
    ) -> View:
        projections = {}
        for one in self.stacks:
            if one.experts is not None and len(operands[one.names]) > 1:
                raise _apart(one, self.quant)
            biases = [values[f"{name}.bias"] for name in one.names] if one.biases else None
            projections[one.names] = Projection(one, operands[one.names], None if biases is None else torch.cat(biases))
        return View({}, values, self._head(values), projections, kv_fp8)

    def _published(self, names: tuple[str, ...], snapshot: Snapshot) -> tuple[LowBitWeight, ...]:
        """What the sampler multiplies with: one operand for all layers where their weights can be stacked."""
        known = snapshot.groups.get(names)
        weights = _stacked([snapshot.weight(name) for name in names]) if known is None else [known]
        return tuple(weight.prepare(self.dtype, self.kernels) for weight in weights)

    def _learner_operands(self, names: tuple[str, ...], snapshot: Snapshot) -> tuple[LowBitWeight, ...]:
        weights = [snapshot.weights[name] for name in names if name in snapshot.weights]
        if self.quant.learner == "fake_quant" and weights:
            if len(weights) < len(names):  # some of the stack are not quantized
                return tuple(operand for name in names for operand in self._learner_operands((name,), snapshot))
            return tuple(
                ordinary_weight(one.dequantize(self.learner_dtype), one.scheme, self.kernels)
                for one in _stacked(weights)
            )
        masters = [f"{name}.weight" for name in names]
        if self.learner_dtype != self.dtype:
            return self._plain([self._rounded(name, snapshot.version) for name in masters])
        if self.quant.learner == "full_precision":
            return self._plain([self.parameters[name] for name in masters])
        return self._published(names, snapshot)

    def _plain(self, weights: list[Tensor]) -> tuple[LowBitWeight, ...]:
        rounded = [weight.detach().to(self.learner_dtype, copy=True) for weight in weights]
        return (ordinary_weight(concatenate_rows(rounded), kernels=self.kernels),)

    def _rounded(self, name: str, version: int) -> Tensor:
        """A master in the learner's dtype, finite, sharing no memory with it."""
        value = quantize_parameter(name, self.parameters[name], None, self.learner_dtype, version)
        assert isinstance(value, Tensor)
        return value

    def _linears(self) -> list[str]:
        return [name for one in self.stacks for name in one.names]

    def _unquantized(self) -> list[str]:
        weights = {f"{name}.weight" for name in self._linears()}
        return [name for name in self.parameters if name not in weights]

    def _head(self, values: Mapping[str, Tensor]) -> Tensor:
        source = values[self.head]
        return source.float() if source.device.type == "cpu" else source


def _apart(experts: Stack, quant: QuantConfig) -> UserError:
    """Why experts whose weights are no one operand do not run on Triton kernels."""
    return UserError(
        f"quant.scheme: {quant.scheme} cannot hold the experts of {experts.names[0]} and its neighbours as one weight: "
        f"some are ignored (quant.ignore), or their {experts.widths[0]} output features share scales or zero points; "
        "quantize all or none, use another scheme, or set quant.kernels: reference"
    )


def _stacked(weights: list[LowBitWeight]) -> list[LowBitWeight]:
    """One weight if all of them can be concatenated, else all as they are."""
    scheme = weights[0].scheme
    same = all(weight.scheme == scheme for weight in weights)
    widths = [weight.shape[0] for weight in weights]
    return [concatenate(weights)] if same and scheme.can_concatenate(widths) else weights


def restack(snapshot: Snapshot, stacks: Iterable[Stack]) -> None:
    """Concatenate the tensors of each stack in memory, so that no view holds them a second time, and record the result
    in `Snapshot.groups`.

    Values stay; the separate tensors of a stack are freed before the next are copied, if the snapshot alone holds them.
    """
    for one in stacks:
        if len(one.names) == 1 or one.names in snapshot.groups:
            continue
        weights = [snapshot.weight(name) for name in one.names]
        found = _stacked(weights)
        if len(found) > 1:
            continue
        for name, weight in zip(one.names, found[0].split(one.widths), strict=True):
            snapshot.tensors.update((f"{name}.{suffix}", tensor) for suffix, tensor in weight.tensors.items())
            if name in snapshot.weights:
                snapshot.weights[name] = weight
        snapshot.groups[one.names] = found[0]
