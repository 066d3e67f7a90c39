"""Commands on models and checkpoints that are not what they say: one line, exit code 2, nothing written."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file
from tiny_runs import settings
from whole_pieces import whole_pieces

from qarl.errors import UserError
from qarl.inference.masters import open_masters
from qarl.inference.opening import open_policy
from qarl.inference.target import resolve_target
from qarl.policy.load import load_model
from qarl.storage.checkpoint import CheckpointStore

NAME = "model.layers.1.mlp.up_proj.weight"


def without(model: Path, directory: Path, name: str = NAME) -> Path:
    shutil.copytree(model, directory)
    tensors = load_file(directory / "model.safetensors")
    del tensors[name]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def test_every_command_refuses_weights_that_are_missing(tiny_model, tmp_path, run_command):
    model, out = without(tiny_model(), tmp_path / "model"), tmp_path / "out"
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(settings(model, train={"run_dir": str(tmp_path / "run")})))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "2 + 2", "answer": "#### 4"}) + "\n")
    for command in (
        ["check", config],
        ["train", config],
        ["quantize", model, out, "--scheme", "w8a8"],
        ["generate", model, "--prompt", "hi"],
        ["eval", model, "--data", f"gsm8k={rows}", "--max-response-length", 8, "--out", out],
        ["compare", "--offline", model, "--schemes", "w8a8", "--max-tokens", 256, "--out", out],
    ):
        code, _, err = run_command(*command)
        assert code == 2, (command, err)
        (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
        assert "1 missing" in line and NAME in line, (command, line)
        assert "Traceback" not in err
    assert not out.exists() or not list(out.rglob("*.safetensors"))
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.fixture
def run_of(tiny_model, tmp_path):
    """run_of(state, masters=...) -> a run directory with one checkpoint."""

    def make(state: object, change=lambda masters: masters) -> Path:
        path = tmp_path / "run"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        (path / "config.yaml").write_text(yaml.safe_dump(settings(tiny_model(), train={"run_dir": str(path)})))
        masters = dict(load_model(resolve_target(str(tiny_model())).model).named_parameters())
        masters = change({name: parameter.detach().clone() for name, parameter in masters.items()})
        CheckpointStore(path / "checkpoints", 0).save(2, whole_pieces({"masters": masters}), state)
        return path

    return make


GOOD = {
    "version": 2,
    "snapshot_sha256": "0" * 64,
    "skipped_in_a_row": 0,
    "optimizer": {"optimizer": "adamw", "tensors": []},
    "data": {"epoch": 0, "position": 0, "fingerprint": "0" * 64},
}


@pytest.mark.parametrize(
    "state", [{k: v for k, v in GOOD.items() if k != "version"}, GOOD | {"snapshot_sha256": "zz"}, []]
)
def test_a_state_without_what_inference_reads_is_refused(run_of, state):
    with pytest.raises(UserError) as caught:
        open_masters(resolve_target(str(run_of(state))))
    assert "checkpoints/000002" in str(caught.value) and "\n" not in str(caught.value)


def test_masters_of_another_model_or_type_are_refused_by_name(run_of):
    for change, message in (
        (lambda masters: {n: m for n, m in masters.items() if n != NAME}, "made for another model"),
        (lambda masters: masters | {NAME: masters[NAME][:-1].clone()}, f"'{NAME}' differs"),
        (lambda masters: masters | {NAME: masters[NAME].half()}, f"{NAME} is torch.float16, and masters are float32"),
    ):
        with pytest.raises(UserError, match=message):
            open_masters(resolve_target(str(run_of(GOOD, change))))


def test_a_run_whose_digest_is_anothers_is_refused(run_of):
    """Also if it is opened with what is no matter of codes."""
    target = resolve_target(str(run_of(GOOD)), quant={"kv_cache_dtype": "fp8"})
    with pytest.raises(UserError, match="its masters quantize to other codes than they did in the run"):
        open_policy(target, device="cpu")
