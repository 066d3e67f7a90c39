"""A model that draws tokens evenly, and whole runs, as tests/training has them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "training"))  # for tiny_runs


@pytest.fixture(scope="session")
def qarl(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """A `tiny_runs.Qarl`."""
    from tiny_runs import Qarl

    runner = Qarl(tmp_path_factory.mktemp("qarl"))
    yield runner
    runner.close()


@pytest.fixture(scope="session")
def even_model(tiny_model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose every next token has the probability 1/259, as `fake_sampler.FakeHost` draws them."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    directory = shutil.copytree(tiny_model("llama"), tmp_path_factory.mktemp("even") / "model")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros_like(tensors["model.norm.weight"])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
