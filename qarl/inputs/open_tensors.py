"""Tensors of safetensors files by name, each file opened once: a header of thousands of tensors takes milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from qarl.inputs.tensors import StoredTensor


class OpenTensors:
    """Reads tensors as `stored` has them, on the CPU, from files that stay open as long as this object lives.

    Raises what the library raises: SafetensorError, OSError, RuntimeError.
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
