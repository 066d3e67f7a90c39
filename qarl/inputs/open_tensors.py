"""Tensors of safetensors files by name. Each file is opened once, because parsing a large header takes milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from qarl.inputs.tensors import StoredTensor


class OpenTensors:
    """Reads the tensors of `stored` on the CPU. Keeps the files open during its lifetime.

    Raises the errors of the library: SafetensorError, OSError, RuntimeError.
    """

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self._stored = stored
        self._opened: dict[Path, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def __getitem__(self, name: str) -> Tensor:
        file = self._stored[name].file
        if file not in self._opened:
            self._opened[file] = safe_open(file, framework="pt")
        return self._opened[file].get_tensor(name)
