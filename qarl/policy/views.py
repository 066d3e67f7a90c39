"""From a snapshot and the masters to the views that forwards read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from qarl_formats.prepared import prepare
from qarl_formats.quantize import QuantizedWeight
from qarl_formats.stacked import Form, Stacked, rows_of, slices, stack, stackable
from torch import Tensor

from qarl.config import QuantConfig
from qarl.errors import UserError
from qarl.policy.operand import Operand, PlainWeight, fake_quant_operand, full_precision_operand
from qarl.policy.projection import Projection, Stack
from qarl.policy.view import View
from qarl.weight_sync.snapshot import Snapshot, named_tensors, quantize_parameter

NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ViewMaker:
    """Makes the views of one policy.

    parameters: the masters, or their values, by name; stacks: the linears that multiply, those of one input together;
    head: the output layer's name. dtype: of what is published; learner_dtype: of the learner's forward. kernels: see
    `prepare`.
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
        self, values: Mapping[str, Tensor], operands: Mapping[tuple[str, ...], tuple[Operand, ...]], kv_fp8: bool
    ) -> View:
        projections = {}
        for one in self.stacks:
            if one.experts is not None and len(operands[one.names]) > 1:
                raise _apart(one, self.quant)
            biases = [values[f"{name}.bias"] for name in one.names] if one.biases else None
            projections[one.names] = Projection(one, operands[one.names], None if biases is None else torch.cat(biases))
        return View({}, values, self._head(values), projections, kv_fp8)

    def _published(self, names: tuple[str, ...], snapshot: Snapshot) -> tuple[Operand, ...]:
        """What the sampler multiplies with: one operand for all layers where their weights can be stacked."""
        known = snapshot.stacks.get(names)
        forms = _stacked([snapshot.form(n) for n in names]) if known is None else [known.whole]
        return tuple(prepare(form, self.dtype, self.kernels) for form in forms)

    def _learner_operands(self, names: tuple[str, ...], snapshot: Snapshot) -> tuple[Operand, ...]:
        weights = [snapshot.weights[name] for name in names if name in snapshot.weights]
        if self.quant.learner == "fake_quant" and weights:
            if len(weights) < len(names):  # some of the stack are not quantized
                return tuple(operand for name in names for operand in self._learner_operands((name,), snapshot))
            quantized = [form for form in _stacked([*weights]) if isinstance(form, QuantizedWeight)]
            return tuple(fake_quant_operand(form, self.learner_dtype) for form in quantized)
        masters = [f"{name}.weight" for name in names]
        if self.learner_dtype != self.dtype:
            return self._plain([self._rounded(name, snapshot.version) for name in masters])
        if self.quant.learner == "full_precision":
            return self._plain([self.parameters[name] for name in masters])
        return self._published(names, snapshot)

    def _plain(self, weights: list[Tensor]) -> tuple[Operand, ...]:
        (one,) = _stacked([full_precision_operand(weight, self.learner_dtype).weight for weight in weights])
        assert isinstance(one, Tensor), "values stack to values"
        return (PlainWeight(one),)

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


def _stacked(forms: list[Form]) -> list[Form]:
    """One weight where all of them can be, else all as they are."""
    if isinstance(forms[0], QuantizedWeight):
        scheme = forms[0].scheme
        widths = [form.shape[0] for form in forms]
        same = all(isinstance(form, QuantizedWeight) and form.scheme == scheme for form in forms)
        return [stack(forms)] if same and stackable(scheme, widths) else forms
    return [stack(forms)] if all(isinstance(form, Tensor) for form in forms) else forms


def restack(snapshot: Snapshot, stacks: Iterable[Stack]) -> None:
    """Put the tensors of each stack under one another in memory, so that no view holds them a second time, and let the
    snapshot say so (`Snapshot.stacks`).

    Values stay; a stack's tensors of their own go before the next are copied, where the snapshot alone holds them.
    """
    for one in stacks:
        if len(one.names) == 1 or one.names in snapshot.stacks:
            continue
        forms = [snapshot.form(name) for name in one.names]
        found = _stacked(forms)
        if len(found) > 1:
            continue
        if not _same_memory(found[0], forms[0]):
            forms = slices(found[0], one.widths)
            for name, form in zip(one.names, forms, strict=True):
                snapshot.tensors.update(named_tensors(f"{name}.weight", form))
                if isinstance(form, QuantizedWeight):
                    snapshot.weights[name] = form
        snapshot.stacks[one.names] = Stacked(found[0], forms)


def _same_memory(whole: Form, first: Form) -> bool:
    """Whether a stack is in the memory of its members, of which one is the first."""
    places = [[tensor.data_ptr() for tensor in _with_rows(form)] for form in (whole, first)]
    return places[0] == places[1]


def _with_rows(form: Form) -> list[Tensor]:
    if isinstance(form, Tensor):
        return [form]
    return [tensor for suffix, tensor in form.tensors.items() if rows_of(form.scheme, suffix) is not None]
