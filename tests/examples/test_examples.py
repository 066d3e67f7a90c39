"""Every script of examples/ runs on the tiny model, from the project's own files alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import Qarl

ROOT = Path(__file__).parents[2]
SAID = {  # what each prints that shows it did its work
    "train_arithmetic": r"3 steps in .*checkpoint .*/000003\n(.*\n)*largest mismatch of sampler and learner: 0\.0 nats",
    "compare_schemes": r"closest to bf16: (w8a8|fp8), KL 0\.\d+ nats\nsmallest checkpoint: w4a16",
    "export_and_generate": r"that the run published: True(.*\n)*('.*from the files: True\n){1,}\Z",
    "diagnose_mismatch": r"mismatch/delta_abs_max +0\.\d+ +0\n",
    "custom_reward": r"reward/closeness.*: \[0\.\d+, ",
}
SHORTER = {
    "train_arithmetic": ["--steps", "3"],
    "compare_schemes": ["--tokens", "300"],
    "custom_reward": ["--steps", "2"],
}


OWN_PROCESS = "custom_reward"  # as users start it; the others are forks of a process that has imported what they do


@pytest.mark.slow
@pytest.mark.parametrize("name", SAID)
def test_the_example_runs_and_says_what_it_shows(name, qarl: Qarl, tmp_path):
    program = ROOT / "examples" / f"{name}.py"
    argv = ["--model", "tiny", "--out", "out", *SHORTER.get(name, [])]
    if name == OWN_PROCESS:
        path = os.pathsep.join(str(ROOT / part) for part in (".", "kernels", "quant_formats"))
        environment = {**os.environ, "PYTHONPATH": path}
        command = [sys.executable, str(program), *argv]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=560)
        code, out, err = done.returncode, done.stdout, done.stderr
    else:
        finished = qarl.run(*argv, cwd=tmp_path, program=program)
        code, out, err = finished.code, finished.out, finished.err
    assert code == 0, err
    assert re.search(SAID[name], out), out
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
