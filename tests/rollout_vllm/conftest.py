"""A model with uniform next-token probabilities."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "distributed"))  # for ranks


@pytest.fixture(scope="session")
def even_model(tiny_model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that gives all 259 tokens the same probability, as `fake_sampler.FakeHost` samples them."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    directory = shutil.copytree(tiny_model("llama"), tmp_path_factory.mktemp("even") / "model")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros_like(tensors["model.norm.weight"])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
