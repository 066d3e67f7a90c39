"""Small comparisons of tiny models."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hand_made_runs import draw_nothing

from qarl.comparison.offline import compare_offline as command
from qarl.comparison.offline.speed import SpeedTest

SMALL = {"max_tokens": 192, "window": 48, "speed": SpeedTest(2, 16, 3, 1), "device": "cpu"}


@pytest.fixture
def compare(tmp_path: Path, monkeypatch) -> Callable[..., tuple[int, list[str]]]:
    """compare(model, schemes, **arguments) -> (exit code, lines printed); writes to tmp_path / "out", empty charts."""
    draw_nothing(monkeypatch)

    def run(model: Path, schemes: list[str], **arguments) -> tuple[int, list[str]]:
        lines: list[str] = []
        group = {"group_size": 32} if {"w4a16", "w4a8"} & set(schemes) else {}
        code = command.compare_offline(
            str(model), schemes, say=lines.append, **{"out": tmp_path / "out", **SMALL, **group, **arguments}
        )
        return code, lines

    return run
