"""Whole runs, in forks of one server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def qarl(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """A `tiny_runs.Qarl`."""
    from tiny_runs import Qarl

    runner = Qarl(tmp_path_factory.mktemp("qarl"))
    yield runner
    runner.close()
