from collections.abc import Callable
from pathlib import Path

import pytest

from qarl.config import Config, load_config

MINIMAL = """\
model: {path: some-org/some-model}
data: {source: "task:arithmetic"}
reward: {functions: [{name: exact}]}
train: {steps: 3}
"""


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    """Return a configuration with only the required keys."""
    path = tmp_path / "minimal.yaml"
    path.write_text(MINIMAL)
    return path


@pytest.fixture
def load(minimal: Path) -> Callable[..., Config]:
    """load(overrides...) -> the minimal configuration with these overrides."""
    return lambda *overrides: load_config(minimal, list(overrides))


@pytest.fixture
def reloaded(tmp_path: Path) -> Callable[[Config], Config]:
    """reloaded(config) -> the configuration that its YAML gives."""

    def reload(config: Config) -> Config:
        (tmp_path / "config.yaml").write_text(config.to_yaml())
        return load_config(tmp_path / "config.yaml")

    return reload
