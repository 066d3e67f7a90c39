"""Kernels compiled before vLLM starts are the ones that its forwards launch later."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from qarl_kernels.launch import collecting

from qarl.rollout.vllm.exact import precompile

SEQUENCES = 24
CASES = {"qwen3": "qwen3", "qwen3 over FP8": "qwen3:fp8", "mixtral": "mixtral"}


@pytest.fixture(scope="module")
def said(tiny_model, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What `precompiled.py` prints."""
    models = []
    for case in CASES.values():
        family, colon, dtype = case.partition(":")
        models.append(f"{tiny_model(family, num_hidden_layers=1, head_dim=32)}{colon}{dtype}")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(Path(__file__).parent), *sys.path]
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("precompiled.py"), *models],
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
    assert found["new"] == []
    assert found["recorded"] >= found["later"] > 10
    rows = found["logit_rows"]
    assert rows == [SEQUENCES] * 5 + [1, 8, SEQUENCES], "never of a whole prefill"


def test_without_graphs_decodes_of_all_sequences_are_compiled(said: list[Any]) -> None:
    assert said[-1] == [SEQUENCES] * 6


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError("no room")])
def test_a_precompilation_that_fails_is_one_line_of_the_log(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def pages() -> NoReturn:
        assert collecting()
        raise error

    lines: list[str] = []
    # vLLM, where another test imported it, passes no line on.
    monkeypatch.setattr(precompile.logger, "warning", lambda text, *parts: lines.append(text % parts))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    mode = SimpleNamespace(has_full_cudagraphs=lambda: False)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=8),
        model_config=SimpleNamespace(max_model_len=16),
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
    )
    model = SimpleNamespace(fused=True, pages=pages)
    precompile.precompile(SimpleNamespace(get_model=lambda: model, device=torch.device("cpu"), vllm_config=config))
    assert lines == [f"kernels are compiled when they are needed: {type(error).__name__}: no room"]
    assert not collecting()
