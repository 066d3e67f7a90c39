"""Non-blocking key-value store shared by the ranks, for heartbeats and for the fault that ends the run."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any


class KeyValueStore(ABC):
    """Key-value store of strings, visible to all ranks. No method blocks; each may raise OSError or RuntimeError."""

    @abstractmethod
    def post(self, name: str, text: str) -> None:
        """Set a key, replacing any previous value."""

    @abstractmethod
    def read(self, name: str) -> str | None:
        """Return the value of a key, or None."""

    @abstractmethod
    def claim(self, name: str, text: str) -> str:
        """Set a key if it is unset. Returns the value of the key afterwards."""


class DirectoryStore(KeyValueStore):
    """Store in a directory of one machine that only its user can access."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def post(self, name: str, text: str) -> None:
        self._temporary(name, text).rename(self._path / name)

    def read(self, name: str) -> str | None:
        try:
            return (self._path / name).read_text()
        except FileNotFoundError:
            return None

    def claim(self, name: str, text: str) -> str:
        temporary = self._temporary(name, text)
        try:
            os.link(temporary, self._path / name)  # atomic: creates a complete file exactly once
        except FileExistsError:
            return (self._path / name).read_text()
        finally:
            temporary.unlink()
        return text

    def _temporary(self, name: str, text: str) -> Path:
        """Write `text` to a file of this process, to be renamed or linked."""
        path = self._path / f".{name}-{os.getpid()}"
        path.write_text(text)
        return path


class TorchStore(KeyValueStore):
    """Store over `torch.distributed.Store`, for several machines. No other thread may use its connection."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def post(self, name: str, text: str) -> None:
        self._store.set(name, text)

    def read(self, name: str) -> str | None:
        return bytes(self._store.get(name)).decode() if self._store.check([name]) else None

    def claim(self, name: str, text: str) -> str:
        return bytes(self._store.compare_set(name, "", text)).decode()
