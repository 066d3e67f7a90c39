"""Settings of a run on generated arithmetic: valid on every machine, without a model to load."""

import json
from pathlib import Path
from typing import Any

from qarl.config import Config

MODEL = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "vocab_size": 1000, "max_position_embeddings": 1024},
}


def plain_settings(**sections: dict[str, Any]) -> dict[str, Any]:
    """Return the required keys of a configuration, with `sections` merged into theirs."""
    base: dict[str, dict[str, Any]] = {
        "model": {"path": "some/model"},
        "data": {"source": "task:arithmetic"},
        "reward": {"functions": [{"name": "exact"}]},
        "train": {"steps": 4},
    }
    return {name: {**base.get(name, {}), **sections.get(name, {})} for name in {**base, **sections}}


def plain_config(**sections: dict[str, Any]) -> Config:
    """Return the configuration of `plain_settings`."""
    return Config.model_validate(plain_settings(**sections))


def write_model(directory: Path, **changes: Any) -> Path:
    """Write a model directory that holds a config.json alone: enough for every check, not for training."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(MODEL | changes))
    return directory
