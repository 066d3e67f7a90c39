"""Failures of the machine are one line with exit code 2 and lose no finished step; defects have exit code 70."""

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st
from tiny_runs import settings, write_config

from qarl.distributed.fault import exit_code
from qarl.errors import MACHINE_FIXES, machine_fault

# --- exceptions


def bare(code: int, path: str | None) -> Exception:
    return OSError(code, os.strerror(code)) if path is None else OSError(code, os.strerror(code), path)


def wrapped(code: int, path: str | None) -> Exception:
    error = RuntimeError("it did not work")
    error.__cause__ = ValueError("neither did this")
    error.__cause__.__cause__ = bare(code, path)
    return error


def said_by_rust(code: int, path: str | None) -> Exception:
    return RuntimeError(f"Error while serializing: I/O error: {os.strerror(code)} (os error {code})")


def said_by_c(code: int, path: str | None) -> Exception:
    return ImportError(f"libx.so: cannot open shared object file: {os.strerror(code)}")


@given(
    code=st.sampled_from(sorted(MACHINE_FIXES)),
    path=st.sampled_from((None, "/tmp/x", "with space", "new\nline")),
    made=st.sampled_from((bare, wrapped, said_by_rust, said_by_c)),
)
@budget(max_examples=80, deadline=None, derandomize=True, database=None)
def test_what_the_machine_refuses_is_one_line_with_its_path_and_a_fix(code, path, made):
    error = made(code, path)
    line = machine_fault(error)
    assert line is not None and os.strerror(code).lower() in line and line.endswith(MACHINE_FIXES[code])
    if path is not None and made in (bare, wrapped):
        assert line.startswith(path.replace("\n", "\\n") + ": ")
    assert exit_code(error) == 2


def in_handling() -> Exception:
    """A defect in code that handles a refusal."""
    try:
        try:
            raise PermissionError(errno.EACCES, "Permission denied", "/x")
        except OSError:
            return {}["missing"]
    except KeyError as error:
        return error


DEFECTS = (
    *(KeyError("x"), RuntimeError("shape mismatch"), in_handling()),
    *(FileNotFoundError(errno.ENOENT, "No such file or directory", "/x"), OSError("without a number")),
    ConnectionResetError(errno.ECONNRESET, "reset"),
)


@pytest.mark.parametrize("error", DEFECTS, ids=repr)
def test_a_defect_stays_one(error):
    assert machine_fault(error) is None and exit_code(error) == 70


# --- commands

COMMANDS = {"check": ["c.yaml"], "train": ["c.yaml"], "train on ranks": ["c.yaml", "--nproc", "2"], "export": ["run"]}
CWD_GONE = "import os; os.rmdir(os.getcwd())\n"
FEW_FILES = """
import os, resource
os.close(free := os.dup(0))
resource.setrlimit(resource.RLIMIT_NOFILE, (free + SPARE, 4096))
"""
SMALL_FILES = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (BYTES, resource.RLIM_INFINITY))\n"
AT_THE_SECOND_ROLLOUT = """
from qarl.rollout.native.engine import NativeEngine
real, calls = NativeEngine.generate, []
def generate(self, *arguments):
    calls.append(1)
    if len(calls) == 2:
        exec(WHAT, {})
    return real(self, *arguments)
NativeEngine.generate = generate
"""


@pytest.fixture
def config(tiny_model, tmp_path) -> Path:
    data = settings(
        tiny_model("llama"),
        train={"steps": 2, "run_dir": str(tmp_path / "run"), "prompts_per_step": 2},
        checkpoint={"every": 1},
        logging={"tensorboard": False},
    )
    return write_config(tmp_path / "c.yaml", data)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_removed_working_directory_is_named_by_every_command(qarl, tmp_path, command):
    (gone := tmp_path / "gone").mkdir()
    done = qarl.run(command.split()[0], *COMMANDS[command], before=CWD_GONE, cwd=gone)
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: the working directory was removed; change to an existing one\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "when"),
    [
        (FEW_FILES.replace("SPARE", "0"), "at the start"),
        (SMALL_FILES.replace("BYTES", "4000"), "at the second rollout"),
    ],
    ids=range(2),
)
def test_a_limit_of_the_process_is_one_line_and_the_run_continues_without_it(qarl, config, tmp_path, what, when):
    before = what if when == "at the start" else AT_THE_SECOND_ROLLOUT.replace("WHAT", repr(what))
    done = qarl.run("train", config, before=before, cwd=tmp_path)
    assert done.code == 2 and done.err.startswith("error: ") and done.err.count("\n") == 1, done.err
    assert any(os.strerror(code).lower() in done.err.lower() for code in (errno.EMFILE, errno.EFBIG)), done.err
    assert "limit" in done.err  # on what, and that it can be raised
    assert (tmp_path / "run" / "checkpoints" / "000001").is_dir() == (when == "at the second rollout")
    done = qarl.run("train", config, cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]
