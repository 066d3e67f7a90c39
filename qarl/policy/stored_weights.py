"""Reads the safetensors files of a model, also of a quantized checkpoint, as float32 masters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from qarl_formats.checkpoints import CheckpointFormat
from qarl_formats.scheme import Scheme, Shape, is_ignored
from qarl_formats.weight import LowBitWeight
from torch import Tensor

from qarl.config import QuantConfig
from qarl.config.architecture import Architecture
from qarl.config.quant import scheme_of
from qarl.config.weight_files import require_weights, stored_format
from qarl.errors import UserError
from qarl.inputs.library_errors import foreign_errors
from qarl.inputs.tensors import OpenTensors, StoredTensor


class StoredWeights:
    """Reads the parameters of a model directory, one at a time. Keeps its files open.

    A quantized weight becomes its dequantized values. If the run's scheme stores weights as the file does, it becomes a
    preimage (`Scheme.preimage`) instead, so that the run's first version has the codes and scales of the file.

    Args:
        directory: Directory of the model.
        architecture: Shapes of the model, from its config.json.
        quant: The `quant` section of the run that reads them; None: dequantized values only.

    Attributes:
        files: The stored tensors by name.
        format: How quantized layers are stored; None if the model is not quantized.
        quantized: Shapes of the quantized Linear layers by module name.
        held: Cache of tensors in memory by name; callers fill it.

    Raises:
        UserError: The tensors are not those that config.json describes.
    """

    def __init__(self, directory: Path, architecture: Architecture, quant: QuantConfig | None = None) -> None:
        self.format: CheckpointFormat | None = stored_format(directory)
        self.files: dict[str, StoredTensor] = require_weights(directory, architecture, self.format)
        self.quantized = dict(_quantized(architecture, self.format, self.files))
        self._parameters = dict(architecture.tensors())
        self._scheme_of = _schemes(quant)
        self._opened = OpenTensors(self.files)
        self.held: dict[str, Tensor] = {}

    def parts(self, name: str) -> dict[str, str]:
        """Return the names of the tensors that store a parameter, by suffix."""
        module = name.removesuffix(".weight")
        if self.format is None or module not in self.quantized:
            return {name.rpartition(".")[2]: name}
        suffixes = self.format.specs(module, self.quantized[module], self.files)
        own = {suffix: f"{module}.{suffix}" for suffix in suffixes}
        return {suffix: part for suffix, part in own.items() if part == name or part not in self._parameters}

    def file(self, name: str) -> Path:
        """Return the file of a parameter; the first one if its tensors are in several."""
        return self.files[next(iter(self.parts(name).values()))].file

    def tensor(self, name: str) -> Tensor:
        """Return a stored tensor, on the CPU. Raises UserError if its file cannot be read."""
        if name in self.held:
            return self.held[name]
        with foreign_errors(f"{self.files[name].file}: cannot be read"):
            return self._opened[name]

    def stored(self, name: str) -> LowBitWeight | Tensor:
        """Return a parameter as the file has it: codes and scales, or values. Raises UserError if they contradict."""
        module = name.removesuffix(".weight")
        if self.format is None or module not in self.quantized:
            return self.tensor(name)
        tensors = {suffix: self.tensor(part) for suffix, part in self.parts(name).items()}
        try:
            return self.format.read(module, tensors, self.quantized[module])
        except ValueError as error:
            raise UserError(f"{self.file(name)}: {error}; restore it") from error

    def read(self, name: str, rows: range | None = None) -> Tensor:
        """Return a master, float32 on the CPU, or some of its rows."""
        if rows is not None and not rows:
            return torch.empty(0, *self._parameters[name][1:])
        found = self.stored(name)
        if isinstance(found, Tensor):
            return (found if rows is None else found[rows.start : rows.stop]).float()
        weight, rest = _cut(found, rows)
        return self._master(name.removesuffix(".weight"), weight)[rest]

    def _master(self, module: str, weight: LowBitWeight) -> Tensor:
        scheme = self._scheme_of(module)
        if scheme is not None and scheme.stores_like(weight.scheme, weight.shape):
            return scheme.preimage(weight.tensors, weight.shape)[0]
        return weight.dequantize(torch.float32)


def _quantized(
    architecture: Architecture, stored: CheckpointFormat | None, files: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, Shape]]:
    if stored is not None:
        for module, n, k in architecture.linears():
            if stored.quantizes(module, files):
                yield module, (n, k)


def _schemes(quant: QuantConfig | None) -> Callable[[str], Scheme | None]:
    """Return a function from a module name to the scheme that quantizes it by RTN in the run, or to None."""
    if quant is None or quant.init != "rtn" or not (scheme := scheme_of(quant)).quantized:
        return lambda module: None
    return lambda module: None if is_ignored(module, quant.ignore) else scheme


def _cut(weight: LowBitWeight, rows: range | None) -> tuple[LowBitWeight, slice]:
    """Cut `rows` out of a weight if its scheme allows it, else return the whole weight; and the slice that is left."""
    if rows is None:
        return weight, slice(None)
    n, unit = weight.shape[0], weight.scheme.row_unit
    if rows.start % unit or (rows.stop % unit and rows.stop != n):
        return weight, slice(rows.start, rows.stop)
    return weight.split([rows.start, len(rows), n - rows.stop])[1], slice(None)
