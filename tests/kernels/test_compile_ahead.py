"""Kernels compiled before they are launched, and what may not happen while launches are only recorded."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from qarl_kernels import library
from qarl_kernels.launch import collecting, recording


def test_different_kernels_are_compiled_and_loaded_in_threads_and_kept_for_their_launches(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = Path(__file__).with_name("compiled_ahead.py")
    done = subprocess.run(
        [sys.executable, program],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # Lengths that are multiples of 16 are one kernel, another block and another dtype are others. What is broken: none.
    assert (found["count"], found["kept"], found["again"]) == (3, 3, 1)
    assert found["loaded"] == ["add_kernel, in a thread"] * 3 and found["kinds"] == ["CompiledKernel"]


def test_the_library_is_not_tried_while_launches_are_recorded() -> None:
    """Its bits would be compared with those of a kernel that did not run, and refused for good."""
    rows = SimpleNamespace(device=SimpleNamespace(type="cuda"), shape=(8192, 64))
    assert not collecting()
    with recording():
        assert collecting() and library.product(rows, None, None, pytest.fail) == 0
    assert not collecting()
