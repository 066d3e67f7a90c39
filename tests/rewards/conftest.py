"""Pools of the functions of `ordered`."""

from pathlib import Path

import pytest
from ordered import FUNCTIONS

from qarl.config.reward import RewardConfig
from qarl.rewards import RewardPool


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("functions") / "functions.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def pool(file):
    pools = []

    def make(*names: str, log_path: Path | None = None, **fields) -> RewardPool:
        functions = [{"name": f"{file}:{name}"} for name in names or ("orders",)]
        pools.append(RewardPool(RewardConfig(functions=functions, **fields), ["answer"], log_path))
        return pools[-1]

    yield make
    for each in pools:
        each.close()
