"""From a snapshot and the masters to the views that forwards read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from qarl_formats.prepared import prepare
from qarl_formats.quantize import QuantizedWeight
from torch import Tensor, nn

from qarl.config import QuantConfig
from qarl.policy.linear import QuantLinear
from qarl.policy.operand import Operand, fake_quant_operand, full_precision_operand
from qarl.policy.view import View
from qarl.weight_sync.snapshot import Snapshot, published


@dataclass(frozen=True)
class ViewMaker:
    """Makes the views of one policy.

    parameters: the masters by name; linears: the modules among them that multiply; head: the output layer's name.
    dtype: of what is published; learner_dtype: of the learner's forward. kernels: see `prepare`.
    """

    parameters: Mapping[str, nn.Parameter]
    linears: Mapping[str, QuantLinear]
    head: str
    quant: QuantConfig
    dtype: torch.dtype
    learner_dtype: torch.dtype
    kernels: bool

    def learner(self, snapshot: Snapshot) -> View:
        """The learner's view of a snapshot just made from the masters.

        In the published dtype it shares the snapshot's tensors; in another one it reads the masters, rounded to that.
        """
        if self.learner_dtype == self.dtype:
            values = {name: snapshot.tensors[name] for name in self._unquantized()}
        else:
            values = {name: self._rounded(name, snapshot.version) for name in self._unquantized()}
        operands = {name: self._learner_operand(name, snapshot) for name in self.linears}
        return View(operands, values, self._head(values))

    def sampling(self, snapshot: Snapshot, learner: View) -> View:
        """A snapshot in the sampler's arithmetic. learner: its learner's view, for what the two have in common."""
        operands = {name: prepare(_form(snapshot, name), self.dtype, self.kernels) for name in self.linears}
        if self.learner_dtype == self.dtype:
            return View(operands, learner.values, learner.head)
        values = {name: snapshot.tensors[name] for name in self._unquantized()}
        return View(operands, values, self._head(values))

    def _learner_operand(self, name: str, snapshot: Snapshot) -> Operand:
        form, master = _form(snapshot, name), f"{name}.weight"
        if self.quant.learner == "fake_quant" and isinstance(form, QuantizedWeight):
            return fake_quant_operand(form, self.learner_dtype)
        if self.learner_dtype != self.dtype:
            return full_precision_operand(self._rounded(master, snapshot.version), self.learner_dtype)
        if self.quant.learner == "full_precision":
            return full_precision_operand(self.parameters[master], self.dtype)
        return prepare(form, self.dtype, self.kernels)

    def _rounded(self, name: str, version: int) -> Tensor:
        """A master in the learner's dtype, finite, sharing no memory with it."""
        value = published(name, self.parameters[name], None, self.learner_dtype, version)
        assert isinstance(value, Tensor)
        return value

    def _unquantized(self) -> list[str]:
        weights = {f"{name}.weight" for name in self.linears}
        return [name for name in self.parameters if name not in weights]

    def _head(self, values: Mapping[str, Tensor]) -> Tensor:
        source = values[self.head]
        return source.float() if source.device.type == "cpu" else source


def _form(snapshot: Snapshot, module: str) -> QuantizedWeight | Tensor:
    form = snapshot.weights.get(module)
    return snapshot.tensors[f"{module}.weight"] if form is None else form
