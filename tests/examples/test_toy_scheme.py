"""examples/toy_scheme.py as a reader would run it: a scheme registered by one class trains, exports and is compared."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import Qarl

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def out(qarl: Qarl, tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("toy") / "out"
    program = ROOT / "examples" / "toy_scheme.py"
    done = qarl.run(tiny_model(), directory, cwd=directory.parent, program=program)
    assert done.code == 0, done.out[-2000:] + done.err[-4000:]
    return directory


def test_a_step_is_trained_with_equal_log_probs_of_sampler_and_learner(out: Path) -> None:
    (record,) = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    assert record["step"] == 1 and record["mismatch/delta_abs_max"] == 0.0
    assert 0 < record["quant/codes_changed_frac"] < 1


def test_the_export_is_the_codes_and_scales_of_the_masters(out: Path) -> None:
    stored = load_file(out / "export" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    codes, scale = stored[f"{name}.weight"], stored[f"{name}.weight_scale"]
    assert codes.dtype == torch.int8 and scale.shape == (codes.shape[0], 1)
    (masters,) = (out / "run" / "checkpoints" / "000001").glob("masters*.safetensors")
    error = (codes.float() * scale.float() - load_file(masters)[f"{name}.weight"]).abs()
    assert (error <= 1.01 * scale.float()).all()
    config = json.loads((out / "export" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "int-quantized" and config["config_groups"]["group_0"]["input_activations"] is None


def test_it_stands_between_the_schemes_that_come_with_qarl(out: Path) -> None:
    members = json.loads((out / "compare" / "comparison.json").read_text())["members"]
    divergence = {member["name"]: member["kl"]["mean"] for member in members}
    assert divergence["bf16"] == 0 < divergence["w8a16"] < divergence["w8a8"]
