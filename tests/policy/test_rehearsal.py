"""What is compiled before vLLM starts is what its forwards launch later."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SEQUENCES = 24
CASES = {"qwen3": "qwen3", "qwen3 over FP8": "qwen3:fp8", "mixtral": "mixtral"}


@pytest.fixture(scope="module")
def said(tiny_model, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What `rehearsed.py` prints."""
    models = []
    for case in CASES.values():
        family, colon, dtype = case.partition(":")
        models.append(f"{tiny_model(family, num_hidden_layers=1, head_dim=32)}{colon}{dtype}")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(Path(__file__).parent), *sys.path]
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("rehearsed.py"), *models],
        env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line[0] in "{["]


@pytest.mark.parametrize("case", CASES)
def test_later_forwards_launch_nothing_else(said: list[Any], case: str) -> None:
    found = said[list(CASES).index(case)]
    assert found["new"] == [] and found["torn"] == []
    assert found["recorded"] >= found["later"] > 10
    assert found["held"] == 0, "the memory of whole forwards"
    rows = found["logit_rows"]
    assert rows == [SEQUENCES] * 4 + [1, 8, SEQUENCES], "never of a whole prefill"


def test_without_graphs_decodes_of_all_sequences_are_compiled(said: list[Any]) -> None:
    assert said[-1] == [SEQUENCES] * 5
