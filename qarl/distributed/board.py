"""Where ranks leave notes for each other that nobody waits for: signs of life, and the fault that ends the run."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any


class Board(ABC):
    """Texts under names, seen by all ranks. Every method returns at once, or raises OSError or RuntimeError."""

    @abstractmethod
    def post(self, name: str, text: str) -> None:
        """Put a text there, in place of what stood under that name."""

    @abstractmethod
    def read(self, name: str) -> str | None:
        """What stands there."""

    @abstractmethod
    def claim(self, name: str, text: str) -> str:
        """Put a text there where nothing stands yet; returns what stands there then."""


class Folder(Board):
    """A directory of one machine, which only its user can open."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def post(self, name: str, text: str) -> None:
        written = self._written(name, text)
        written.rename(self._path / name)

    def read(self, name: str) -> str | None:
        try:
            return (self._path / name).read_text()
        except FileNotFoundError:
            return None

    def claim(self, name: str, text: str) -> str:
        written = self._written(name, text)
        try:
            os.link(written, self._path / name)  # the one way to create a file whole, and once
        except FileExistsError:
            return (self._path / name).read_text()
        finally:
            written.unlink()
        return text

    def _written(self, name: str, text: str) -> Path:
        written = self._path / f".{name}-{os.getpid()}"
        written.write_text(text)
        return written


class StoreBoard(Board):
    """A `torch.distributed.Store` of several machines, which no other thread uses."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def post(self, name: str, text: str) -> None:
        self._store.set(name, text)

    def read(self, name: str) -> str | None:
        return bytes(self._store.get(name)).decode() if self._store.check([name]) else None

    def claim(self, name: str, text: str) -> str:
        return bytes(self._store.compare_set(name, "", text)).decode()
