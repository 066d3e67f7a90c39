"""Model directories of each kind, made once per session."""

from pathlib import Path

import pytest
from damaged_models import Weights, quantized_copy


@pytest.fixture(scope="session")
def bases(tiny_model, tmp_path_factory) -> dict[str, Path]:
    """Return one model directory per kind."""
    plain = tiny_model("llama")
    exported = tmp_path_factory.mktemp("exports")
    return {
        "single": plain,
        "shards": Weights.of(plain).save(tmp_path_factory.mktemp("shards") / "model", shards=3),
        "qwen3": tiny_model("qwen3"),
        "export": quantized_copy(plain, exported / "w4a16", {"scheme": "w4a16", "group_size": 32}),
    }
