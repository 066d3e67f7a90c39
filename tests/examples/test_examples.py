"""Every script of examples/ runs on the tiny model, from the project's own files alone."""

import re
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


@pytest.mark.slow
@pytest.mark.parametrize("name", SAID)
def test_the_example_runs_and_says_what_it_shows(name, qarl: Qarl, tmp_path):
    program = ROOT / "examples" / f"{name}.py"
    done = qarl.run("--model", "tiny", "--out", "out", *SHORTER.get(name, []), cwd=tmp_path, program=program)
    assert done.code == 0, done.err
    assert re.search(SAID[name], done.out), done.out
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
