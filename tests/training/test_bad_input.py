"""Mistakes of a user: `qarl train` reports each in one line, exits with code 2, and leaves no files behind."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import settings, write_config

pytestmark = pytest.mark.slow

ROWS = [{"question": f"what is {i}?", "answer": str(i), "prompt": f"p{i}"} for i in range(6)]
MISSING = "import sys\nsys.modules['{}'] = None\n"

# what is wrong: (sections that replace those of `settings`, Python to run first, what the line must say)
FAULTS: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "group size does not divide": (
        {"quant": {"group_size": 128}},
        "",
        ["quant.group_size", "model.layers.0.self_attn.q_proj", "64", "32"],
    ),
    "more prompts a step than there are": (
        {"data": {"source": "rows.jsonl"}, "train": {"prompts_per_step": 8}},
        "",
        ["train.prompts_per_step: 8", "6 prompts"],
    ),
    "reward file does not import": (
        {"reward": {"functions": [{"name": "broken.py:judge"}]}},
        "",
        ["`broken.py:judge`", "does not import", "no_such_module", "broken.py:1"],
    ),
    "no CUDA device": ({"model": {"device": "cuda"}}, "", ["model.device: cuda", "auto or cpu"]),
    "tensorboard is not installed": (
        {},
        MISSING.format("torch.utils.tensorboard") + MISSING.format("tensorboard"),
        ["logging.tensorboard", "pip install tensorboard"],
    ),
    "damaged checkpoint": ({"checkpoint": {"resume": "damaged"}}, "", ["damaged/manifest.json", "not valid JSON"]),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "manifest.json").write_text("{")
    return tmp_path


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.mark.parametrize("sections, before, said", FAULTS.values(), ids=FAULTS.keys())
def test_refused_with_one_line_and_nothing_written(qarl, tiny_model, folder, sections, before, said):
    config = write_config(folder / "c.yaml", settings(tiny_model("llama"), **sections))
    there = tree(folder)
    done = qarl.run("train", config, before=before, cwd=folder)
    assert done.code == 2, done.err
    assert done.err.startswith("error: ") and done.err.count("\n") == 1, done.err
    assert not [text for text in said if text not in done.err], done.err
    assert tree(folder) == there


def test_a_run_directory_of_another_configuration_is_refused_before_anything_is_loaded(qarl, tiny_model, folder):
    config = write_config(folder / "c.yaml", settings(tiny_model("llama"), train={"steps": 1}))
    assert qarl.run("train", config, cwd=folder).code == 0
    before = {path: path.read_bytes() for path in (folder / "runs").rglob("*") if path.is_file()}
    load = "import qarl.training.loop as loop\nloop.build_run = None\n"
    done = qarl.run("train", config, "optim.lr=1e-2", before=load, cwd=folder)
    assert done.code == 2 and done.err.count("\n") == 1
    assert "optim.lr is 0.001 there, 0.01 here" in done.err
    assert {path: path.read_bytes() for path in (folder / "runs").rglob("*") if path.is_file()} == before
