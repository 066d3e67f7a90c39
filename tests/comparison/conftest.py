"""Whole comparisons, in forks of one server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "training"))


@pytest.fixture(scope="session")
def qarl(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """A `tiny_runs.Qarl`."""
    from tiny_runs import Qarl

    runner = Qarl(tmp_path_factory.mktemp("compare"))
    yield runner
    runner.close()
