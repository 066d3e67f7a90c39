"""Lazily read checkpoint tensors: views of memory-mapped files, or pieces that are concatenated on access."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from qarl.inputs.files import Unreadable
from qarl.storage.manifest import Manifest, PiecesManifest
from qarl.storage.tensorfile import read_tensors


class StoredTensors(Mapping[str, Tensor]):
    """Tensors by name.

    `tensors[name]` is a CPU view of the mapped file. A tensor in several pieces is concatenated into a new tensor that
    is not cached, so take one at a time and copy it.

    Args:
        shapes: Shapes of the tensors, in their order.
        pieces: Name to (start, values) of each piece, ascending. The values are (n,), of one dtype, and cover the
            flattened tensor.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], pieces: Mapping[str, Sequence[tuple[int, Tensor]]]
    ) -> None:
        self._shapes, self._pieces = dict(shapes), pieces

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> StoredTensors:
        """Build from whole, contiguous tensors."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        return cls(shapes, {name: [(0, tensor.view(-1))] for name, tensor in tensors.items()})

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype; float32 for an empty tensor, which is in no file."""
        pieces = self._pieces.get(name)
        return pieces[0][1].dtype if pieces else torch.float32

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the flattened tensor: (stop - start,)."""
        assert 0 <= start <= stop <= prod(self._shapes[name]), f"{name}: [{start}, {stop}) of {self._shapes[name]}"
        parts = [
            values[max(0, start - first) : stop - first]
            for first, values in self._pieces.get(name, ())
            if first < stop and start < first + len(values)
        ]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype(name))

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        return self.read(name, 0, prod(shape)).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def open_group(directory: Path, manifest: Manifest, group: str) -> StoredTensors:
    """Open the tensors of a checkpoint's group. Raises NoSuchFile, Unreadable."""
    if not isinstance(manifest, PiecesManifest):
        tensors: dict[str, Tensor] = {}
        for file in manifest.groups[group]:
            tensors |= read_tensors(directory / file)
        return StoredTensors.of(tensors)
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    for file in manifest.groups[group]:
        there, spans = read_tensors(directory / file), manifest.pieces[file]
        if odd := sorted(there.keys() ^ spans.keys()):
            raise Unreadable(str(directory / file), f"'{odd[0]}' is in one of the file and the manifest only")
        for name, (start, stop) in spans.items():
            if tuple(there[name].shape) != (stop - start,):
                shape = list(there[name].shape)
                raise Unreadable(str(directory / file), f"'{name}' has shape {shape}, not [{stop - start}]")
            others = pieces.setdefault(name, [])
            if others and others[0][1].dtype != there[name].dtype:
                raise Unreadable(
                    str(directory / file), f"'{name}' is {there[name].dtype}, elsewhere {others[0][1].dtype}"
                )
            others.append((start, there[name]))
    for stretches in pieces.values():
        stretches.sort(key=lambda stretch: stretch[0])
    return StoredTensors({name: tuple(shape) for name, shape in manifest.shapes[group].items()}, pieces)
