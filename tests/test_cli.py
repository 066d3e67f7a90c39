"""The command line: exit codes, what is printed, and what is never imported."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from plain_settings import write_model

from qarl import __version__, cli
from qarl.config import load_config
from qarl.errors import UserError
from qarl.terminal.console import Console

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "datasets")
CONFIG = """\
model: {path: MODEL}
quant: {group_size: 32}
data: {source: "task:arithmetic", max_prompt_length: 64}
rollout: {max_response_length: 64}
reward: {functions: [{name: exact}]}
train: {steps: 3}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(CONFIG.replace("MODEL", str(write_model(tmp_path / "model"))))
    return path


@pytest.fixture
def loop(monkeypatch) -> types.ModuleType:
    """A stand-in for the training loop, which needs torch; tests set its `train`."""
    module = types.ModuleType("qarl.training.loop")
    monkeypatch.setitem(sys.modules, "qarl.training.loop", module)
    return module


def run(*argv: object) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main([str(arg) for arg in argv])
    return caught.value.code or 0


def python(code: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join(str(ROOT / part) for part in (".", "kernels", "quant_formats"))
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60
    )


def test_version_and_schema_are_printed(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out.strip() == __version__
    assert run("schema") == 0
    assert "quant" in json.loads(capsys.readouterr().out)["properties"]


def test_check_prints_the_resolved_config_and_the_estimate_and_writes_nothing(config, capsys, tmp_path, monkeypatch):
    (folder := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("qarl.terminal.console.table_console", lambda: Console(width=80))
    assert run("check", config, "optim.lr=1e-5") == 0
    out = capsys.readouterr().out
    text, _, rest = out.partition("\n\n")
    copy = tmp_path / "copy.yaml"
    copy.write_text(text)
    assert load_config(copy) == load_config(config, ["optim.lr=1e-5"])
    assert all(rest.count(text) == 1 for text in ("64 responses per step", "Memory estimate (cpu)", " peak "))
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_check_warns_of_settings_that_need_a_gpu_if_there_is_none(device, config, capsys, monkeypatch):
    monkeypatch.setattr("qarl.cli.expected_device", lambda config: device)
    assert run("check", config, "quant.backward=fp8", "diagnostics.backward_every=2") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    here = "a machine without a GPU has no Triton kernels and no FP8 matrix products"
    expected = [
        f'warning: will not train here: quant.backward = "fp8": {here}; use bf16',
        f"warning: will not train here: diagnostics.backward_every = 2: {here}; must be 0",
    ]
    assert lines == (expected if device == "cpu" else [])


def test_check_prints_the_expansion_of_a_preset_and_what_an_estimate_needs(config, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    correction = ["objective={name: grpo}", "correction={preset: srs-k3-ppo, veto: 1e-4}"]
    assert run("check", config, "model.path=some-org/some-model", *correction) == 0
    line = "correction.preset srs-k3-ppo: reject sum k3 of rollout outside [none, 0.001]; veto below 0.0001"
    out = capsys.readouterr().out
    assert f"{line}; objective.ratio rollout\n" in out and "need the model's config.json locally" in out


def test_every_fault_is_an_error_line_on_stderr_and_exit_2(config, capsys):
    assert run("check", config, "quant.scheme=w5", "train.steps=0") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("error: command line: ") for line in lines)


def test_train_checks_files_passes_the_config_and_returns_its_exit_code(config, loop, capsys):
    loop.train = lambda given: pytest.fail("the loop started")
    assert run("train", config, "data.source=absent.jsonl") == 2
    assert "no such file" in capsys.readouterr().err
    seen = []
    loop.train = lambda given: seen.append(given) or 7
    assert run("train", config, "train.steps=5") == 7
    assert [given.train.steps for given in seen] == [5]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("data.columns: no column 'question'"), 2, "error: data.columns: no column 'question'\n"),
        (MemoryError(), 2, "error: out of memory (MemoryError); use a larger machine\n"),
        (KeyboardInterrupt(), 130, None),
    ],
)
def test_an_error_of_the_loop_is_one_line_without_traceback(config, loop, capsys, error, code, line):
    def fail(given):
        raise error

    loop.train = fail
    assert run("train", config) == code
    assert line in (None, capsys.readouterr().err)


def test_a_bug_is_one_line_and_a_file_with_its_traceback(config, loop, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fail(given):
        raise ZeroDivisionError("of a\nkind")

    loop.train = fail
    assert run("train", config) == 70
    line = capsys.readouterr().err
    (file,) = tmp_path.glob("qarl-fault-*.txt")
    assert line == (
        f"error: internal error: ZeroDivisionError: of a kind; please report it with the traceback in {file}\n"
    )
    assert "in fail" in file.read_text() and file.stat().st_mode & 0o077 == 0


def test_imports_are_free_of_heavy_libraries():
    """Importing qarl alone loads no pydantic, its functions no rich, and commands that only read no matplotlib."""
    done = python(
        "import sys, qarl\nprint({'pydantic'} & set(sys.modules))\n"
        f"qarl.train, qarl.compare_offline, qarl.Config; print({{'rich', *{HEAVY}}} & set(sys.modules))\n"
        "import qarl.config, qarl.cli, qarl.cli.runs, qarl.memory.estimate, qarl.objectives, qarl.storage.runs\n"
        f"print({{'matplotlib', *{HEAVY}}} & set(sys.modules))\n"
        f"import qarl.report.diagnostics; print(set({HEAVY}) & set(sys.modules))"
    )
    assert done.stdout.split() == ["set()"] * 4, done.stderr


def test_check_is_free_of_heavy_libraries(config):
    for model in ("", "model.path=some-org/some-model"):
        argv = ["check", str(config), *([model] if model else [])]
        code = f"try:\n    main({argv})\nexcept SystemExit as end:\n    assert not end.code\n"
        done = python(f"import sys\nfrom qarl.cli import main\n{code}print(set({HEAVY}) & set(sys.modules))")
        assert done.stdout.splitlines()[-1] == "set()", done.stderr
