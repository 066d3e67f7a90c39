"""Runs that start from the codes of GPTQ or AWQ."""

import re
from pathlib import Path

import forked_launch
import pytest
import torch
from qarl_formats.registry import make_scheme
from run_faults import recorded
from safetensors.torch import load_file
from tiny_runs import Finished, Qarl, settings, write_config

from qarl.config import ModelConfig, load_config
from qarl.errors import UserError
from qarl.policy.load import load_model

pytestmark = pytest.mark.slow

TEXT = "".join(f"{n} times {n + 1} is {n * (n + 1)}. The next one is harder: try it.\n" for n in range(60))


class Runs:
    """Runs of one configuration in one folder."""

    def __init__(self, qarl: Qarl, model: Path, folder: Path) -> None:
        self.qarl, self.folder, self.text = qarl, folder, folder / "text.txt"
        self.text.write_text(TEXT)
        calibration = {"source": str(self.text), "samples": 8, "length": 64}
        quant = {"init": "gptq", "calibration": calibration}
        data = settings(model, quant=quant, train={"steps": 2}, checkpoint={"every": 1})
        self.config = write_config(folder / "c.yaml", data)

    def train(self, name: str, *overrides: str, **named) -> Finished:
        run = f"train.run_dir={self.folder / name}"
        return self.qarl.run("train", self.config, run, *overrides, cwd=self.folder, **named)

    def metrics(self, name: str) -> list[dict]:
        kept = ("policy/", "mismatch/", "reward")
        return [{k: v for k, v in row.items() if k.startswith(kept)} for row in recorded(self.folder / name)]

    def masters(self, name: str, step: int) -> dict[str, torch.Tensor]:
        files = sorted((self.folder / name / "checkpoints" / f"{step:06}").glob("masters*.safetensors"))
        return {key: value for file in files for key, value in load_file(file).items()}


@pytest.fixture
def runs(qarl, tiny_model, tmp_path) -> Runs:
    return Runs(qarl, tiny_model("llama"), tmp_path)


def test_a_run_resumes_with_the_same_bits_and_the_same_reference(runs):
    init = "quant.init=awq", "objective.kl_coef=0.1"
    assert runs.train("whole", *init).code == 0
    runs.train("parts", *init, "train.steps=1")
    done = runs.train("parts", *init)
    assert done.code == 0 and "resumed from" in done.out
    assert runs.metrics("parts") == runs.metrics("whole")
    ours, theirs = runs.masters("parts", 2), runs.masters("whole", 2)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert runs.metrics("whole")[0]["mismatch/delta_abs_max"] == 0.0


def test_the_first_masters_are_those_of_the_method(runs, tiny_model):
    """With a tiny learning rate the masters stay what they were."""
    still = "optim.lr=1e-12", "optim.weight_decay=0", "train.steps=1"
    assert runs.train("nearest", "quant.init=rtn", *still).code == 0
    assert runs.train("gptq", *still).code == 0
    name = "model.layers.0.mlp.down_proj.weight"
    model = load_model(ModelConfig(path=str(tiny_model("llama"))))
    original = dict(model.named_parameters())[name].detach()
    nearest, ours = (runs.masters(run, 1)[name] for run in ("nearest", "gptq"))
    assert torch.allclose(nearest, original, atol=1e-9)
    scheme = make_scheme("w4a16", 32)
    codes, expected = (scheme.codes(scheme.quantize(one)[0], (64, 128)) for one in (ours, original))
    assert 0.02 < (codes != expected).float().mean() < 0.5


def test_another_calibration_text_is_refused_when_a_run_resumes(runs):
    runs.train("run", "train.steps=1")
    runs.text.write_text(TEXT[::-1])
    done = runs.train("run")
    assert done.code == 2 and "quant.init: the method or its calibration text changed since it was saved" in done.err


def test_the_run_s_prompts_can_calibrate(runs):
    assert runs.train("run", "train.steps=1", "quant.calibration.source=prompts").code == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["quant.scheme=fp8", "quant.group_size=null"], "is for w4a16, w8a8, w4a8, nvfp4a16, not fp8; use rtn"),
        (["quant.scheme=w8a8", "quant.group_size=null", "quant.init=awq"], "is for w4a16, nvfp4a16, not w8a8; use rtn"),
        (["optim.master_dtype=bfloat16"], "masters rounded to optim.master_dtype bfloat16"),
    ],
)
def test_settings_that_cannot_be_calibrated_are_refused_in_one_line(runs, overrides, message):
    with pytest.raises(UserError, match=re.escape(message)) as refused:
        load_config(runs.config, overrides)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("source", "message"), [("missing.txt", "missing.txt: no such file"), ("blank.txt", "is empty; give a text")]
)
def test_a_text_that_cannot_calibrate_is_refused_in_one_line(runs, source, message):
    (runs.folder / "blank.txt").write_text(" \n")
    done = runs.train("run", f"quant.calibration.source={source}")
    assert done.code == 2 and message in done.err and done.err.count("\n") == 1
    assert not (runs.folder / "run").exists()


def test_two_ranks_start_from_a_checkpoint_with_the_codes(runs, tiny_model):
    done = runs.train("run", "--nproc=2", before=forked_launch.before())
    assert done.code == 2 and "quant.init: gptq: needs one process; write the model with `qarl quantize" in done.err
    out, options = runs.folder / "gptq", ["--scheme", "w4a16", "--group-size", "32", "--method", "gptq"]
    assert runs.qarl.run("quantize", tiny_model("llama"), out, *options, "--calibration", runs.text).code == 0
    given = "quant.init=rtn", f"model.path={out}", "train.steps=1"
    done = runs.train("run", "--nproc=2", *given, before=forked_launch.before())
    assert done.code == 0, done.err
    same = "version 0 has the codes and scales of the quantized checkpoint"
    line = next(line for line in done.out.splitlines() if same in line)
    assert "without a preimage" not in line
