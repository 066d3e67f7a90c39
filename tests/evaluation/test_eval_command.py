"""`qarl eval` as a user runs it: on a model, on a run, again, and with what cannot be."""

import json
import os
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROWS = [{"question": f"What is {a} + 3?", "answer": f"Sum.\n#### {a + 3}"} for a in range(5)]

# Ends like Ctrl-C in the second batch.
INTERRUPT = """
import qarl.evaluation.runner as runner, qarl.evaluation.directory as directory
runner.BATCH_RESPONSES = 4
real = directory.ResultsDirectory.append
def append(self, rows):
    real(self, rows)
    if len(self.rows) >= 8:
        raise KeyboardInterrupt
directory.ResultsDirectory.append = append
"""
OUT_OF_MEMORY = INTERRUPT.replace("KeyboardInterrupt", "RuntimeError('CUDA out of memory. Tried to allocate 9 GiB.')")


class Commands:
    def __init__(self, qarl, model: Path, folder: Path) -> None:
        self.qarl, self.model, self.folder = qarl, model, folder
        self.file = folder / "gsm8k.jsonl"
        self.file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def eval(self, *arguments: object, before: str = ""):
        return self.qarl.run("eval", *arguments, before=before, cwd=self.folder)

    def gsm8k(self, *arguments: object, before: str = ""):
        return self.eval(
            self.model, "--data", f"gsm8k={self.file}", "--max-response-length", 8, *arguments, before=before
        )

    def refused(self, *arguments: object) -> str:
        before = sorted(self.folder.rglob("*"))
        done = self.eval(*arguments)
        assert done.code == 2 and done.err.startswith("error: ") and done.err.count("\n") == 1, done.err
        assert sorted(self.folder.rglob("*")) == before
        return done.err


@pytest.fixture
def commands(qarl, tiny_model, tmp_path) -> Commands:
    return Commands(qarl, tiny_model("llama"), tmp_path)


@pytest.fixture(scope="module")
def trained(qarl, tiny_model, tmp_path_factory) -> Path:
    from tiny_runs import settings, write_config

    folder = tmp_path_factory.mktemp("trained")
    config = write_config(folder / "c.yaml", settings(tiny_model("llama"), train={"steps": 1}))
    done = qarl.run("train", config, f"train.run_dir={folder / 'run'}")
    assert done.code == 0, done.err
    return folder / "run"


def test_a_model_on_a_local_set_leaves_results_and_every_completion(commands):
    quant = ["--scheme", "w4a16", "--group-size", 32, "--kv-cache-dtype", "fp8"]
    done = commands.gsm8k("--samples", 2, "--k", "1,2", "--max-prompts", 3, *quant)
    assert (done.code, done.err) == (0, "")
    assert "avg@2" in done.out and "pass@2" in done.out and "w4a16, FP8 KV cache: mean" in done.out
    (folder,) = (commands.folder / "eval").iterdir()
    assert "-w4a16-kv-fp8-gsm8k-" in folder.name
    results = json.loads((folder / "results.json").read_text())
    assert results["kv_cache_dtype"] == "fp8"
    assert (results["format_version"], results["scheme"], results["step"], results["samples"]) == (1, "w4a16", None, 2)
    (task,) = results["tasks"]
    assert (task["name"], task["prompts"]) == ("gsm8k", 3) and set(task["pass"]) == {"1", "2"}
    assert results["overall"]["avg"] == pytest.approx(task["avg"])
    assert results["command"][:2] == ["qarl", "eval"] and results["environment"]["packages"]["torch"]
    rows = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    assert [(r["prompt_id"], r["sample"]) for r in rows] == [(p, s) for p in range(3) for s in range(2)]
    assert rows[0]["answer"] == ROWS[0]["answer"] and "\\boxed{}" in rows[0]["prompt"]


def test_out_of_memory_it_says_what_to_lower_and_goes_on_from_there(commands):
    options = ["--samples", 2, "--seed", 3]
    done = commands.gsm8k(*options, before=OUT_OF_MEMORY)
    assert done.code == 2 and done.err == (
        "error: out of memory (CUDA out of memory. Tried to allocate 9 GiB.); "
        "lower --max-response-length, or take a larger machine; rerun the same command to resume\n"
    )
    (folder,) = (commands.folder / "eval").iterdir()
    kept = sum(path.read_text().count("\n") for path in folder.glob("*.jsonl"))
    assert kept == 8 and commands.gsm8k(*options).code == 0
    assert json.loads((folder / "results.json").read_text())["samples"] == 2


def _flip_weight(folder: Path) -> None:
    file = folder / "model/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def _change_row(folder: Path) -> None:
    rows = [ROWS[0] | {"answer": "9"}, *ROWS[1:]]
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


EDITS = {
    "weights": (_flip_weight, "weights is"),
    "answer": (_change_row, "tasks.gsm8k is"),
    "nothing": (lambda folder: os.utime(folder / "model/config.json", ns=(10**18, 10**18)), None),
}


def test_an_evaluation_does_not_go_on_after_any_of_its_inputs_changed(commands):
    """Completions of two models or two data sets must not become one average."""
    kept = commands.folder / "kept"
    shutil.copytree(commands.model, kept / "model")
    shutil.copy(commands.file, kept)
    commands.model = commands.folder / "model"
    shutil.copytree(kept, commands.folder, dirs_exist_ok=True)
    assert commands.gsm8k("--out", "r", before=INTERRUPT).code == 130
    before = (commands.folder / "r/completions.jsonl").read_bytes()
    wrong = []
    for name, (edit, line) in EDITS.items():
        shutil.copytree(kept, commands.folder, dirs_exist_ok=True)
        edit(commands.folder)
        done = commands.gsm8k("--out", "r")
        refused = done.code == 2 and f"r: holds the results of another evaluation ({line}" in done.err
        if refused != (line is not None):
            wrong.append((name, done.err))
        elif line:
            assert (commands.folder / "r/completions.jsonl").read_bytes() == before
        else:
            assert "resuming from 8 completions" in done.out
    assert not wrong


def test_a_run_without_tasks_is_evaluated_on_its_training_data(commands, trained):
    done = commands.eval(trained, "--max-prompts", 2, "--samples", 1)
    assert done.code == 0, done.err
    assert "no --data and no evaluation.tasks in the run: using its training data, at most 2 rows" in done.out
    (folder,) = (trained / "eval").iterdir()
    assert folder.name.startswith("000001-w4a16-train-")
    results = json.loads((folder / "results.json").read_text())
    assert (results["step"], results["sampling"]["max_response_length"]) == (1, 8)


def test_prompts_that_do_not_fit_the_context_are_refused(commands):
    said = commands.refused(commands.model, "--data", f"gsm8k={commands.file}", "--max-response-length", 500)
    assert "5 of 5 prompts" in said and "exceed the context of 512 tokens" in said
