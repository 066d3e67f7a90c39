"""`qarl export` and `qarl quantize`: what they print, and every refusal as one line with nothing left behind."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tiny_exports import SCHEMES, TinyRun, entries, same_bytes, save_run, stored_tensors

from qarl.config.quant import scheme_of
from qarl.inference.masters import open_masters
from qarl.inference.opening import snapshot_of
from qarl.inference.target import resolve_target


@pytest.fixture
def run(tiny_model, tmp_path) -> TinyRun:
    return save_run(tmp_path / "run", tiny_model())


@pytest.fixture
def qarl(run_command):
    """qarl(*argv) -> what was printed; fails unless it exits with 0."""

    def call(*argv: object) -> str:
        code, out, err = run_command(*argv)
        assert code == 0, err
        return out

    return call


@pytest.fixture
def refusal(run_command):
    """refusal(*argv) -> the one line on stderr; fails unless the exit code is 2 and stdout is empty."""

    def call(*argv: object) -> str:
        code, out, err = run_command(*argv)
        assert (code, out) == (2, "")
        assert err.startswith("error: ") and err.count("\n") == 1, err
        return err

    return call


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_export_writes_the_newest_checkpoint_below_the_run(run, qarl):
    out = qarl("export", run.path)
    directory = run.path / "export"
    digest = run.snapshots[4].manifest().digest()
    total = sum(path.stat().st_size for path in directory.iterdir())
    assert f"{directory}: {total:,} bytes in {len(entries(directory))} files, 1 of them with tensors" in out
    assert f"snapshot sha256 {digest[:16]}: the digest that the run recorded" in out
    assert out.count("\n") == 3


def test_export_of_a_step_in_shards_or_of_its_directory_writes_that_checkpoint(run, qarl, refusal, tmp_path):
    qarl("export", run.path, tmp_path / "out", "--step", 2, "--max-shard-size", "40KB")
    stored, published = stored_tensors(tmp_path / "out"), run.snapshots[2].tensors
    assert all(same_bytes(stored[name], published[name]) for name in published)
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]
    assert len(sizes) > 1 and max(sizes) < 45_000
    qarl("export", run.path / "checkpoints" / "000002")
    assert json.loads((run.path / "export" / "qarl_export.json").read_text())["step"] == 2
    assert "is exported already" in refusal("export", run.path / "export", tmp_path / "again")


def test_export_finds_a_base_model_that_moved_with_the_option(tiny_model, tmp_path, qarl, refusal):
    base = shutil.copytree(tiny_model(), tmp_path / "base")
    run = save_run(tmp_path / "run", base)
    base.rename(tmp_path / "moved")
    line = refusal("export", run.path, tmp_path / "out")
    assert str(base) in line and "--model" in line and not (tmp_path / "out").exists()
    qarl("export", run.path, tmp_path / "out", "--model", tmp_path / "moved")
    assert stored_tensors(tmp_path / "out").keys() == run.snapshots[4].tensors.keys()


class FakeHub:
    """The calls of huggingface_hub's HfApi that an export makes."""

    def __init__(self) -> None:
        self.calls = []

    def create_repo(self, name: str, *, private: bool, exist_ok: bool):
        self.calls.append(("create_repo", name, private, exist_ok))
        return SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str):
        self.calls.append(("upload_folder", repo_id, sorted(os.listdir(folder_path)), commit_message))
        return SimpleNamespace(commit_url=f"hub/{repo_id}/1")


@pytest.mark.parametrize("ok", [True, False])
def test_an_export_is_pushed_with_its_card_unless_its_verification_failed(ok, run, tmp_path, monkeypatch, run_command):
    hub = FakeHub()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    seen = []

    def verify(target, out, **options):
        seen.append((target.step, out, entries(out) != []))
        return {"ok": ok}

    monkeypatch.setattr("qarl.exporting.verify.verify_export", verify)
    code, out, _ = run_command("export", run.path, tmp_path / "out", "--verify", "--push-to-hub", "mine", "--private")
    assert seen == [(4, tmp_path / "out", True)] and code == (not ok)
    assert hub.calls[0] == ("create_repo", "mine", True, True)
    assert [call[:2] for call in hub.calls[1:]] == ([("upload_folder", "me/mine")] if ok else [])
    if ok:
        assert {"README.md", "model.safetensors", "qarl_export.json"} <= set(hub.calls[1][2])
        assert "Step 4" in hub.calls[1][3]
    assert ("pushed to hub/me/mine/1" in out) == ok


def test_export_of_what_the_run_does_not_have_says_what_it_has_or_that_nothing_is_left(run, refusal):
    assert "--step: " in (line := refusal("export", run.path, "--step", 3)) and "it has 2, 4" in line
    shutil.rmtree(run.path / "checkpoints" / "000002")
    flip(run.path / "checkpoints" / "000004" / "state.json")
    assert "restore it from a copy" in refusal("export", run.path)
    shutil.rmtree(run.path / "checkpoints")
    assert "the run has no checkpoint yet" in refusal("export", run.path)


@pytest.mark.parametrize("name", ["asymmetric", "symmetric7", "fp8_block"])
def test_quantize_stores_what_round_to_nearest_gives(name, tiny_model, qarl, tmp_path):
    wanted = SCHEMES[name]
    options = ["--group-size", wanted["group_size"]] if "group_size" in wanted else []
    options += ["--asymmetric"] * (not wanted.get("symmetric", True))
    options += ["--grid", wanted["grid"]] if "grid" in wanted else []
    options += ["--no-vllm"] * (name == "fp8_block")  # the layers are smaller than a block
    qarl("quantize", tiny_model("qwen2"), tmp_path / "out", "--scheme", wanted["scheme"], *options)
    target = resolve_target(str(tiny_model("qwen2")), quant=wanted)
    expected = snapshot_of(target, open_masters(target), torch.bfloat16).tensors
    stored = stored_tensors(tmp_path / "out")
    assert stored.keys() == expected.keys()
    assert all(same_bytes(stored[tensor], expected[tensor]) for tensor in expected)
    opened = resolve_target(str(tmp_path / "out"))
    assert opened.kind == "export" and scheme_of(opened.quant).name == wanted["scheme"]


def test_what_vllm_cannot_fuse_is_exported_on_request_only(tiny_model, qarl, refusal, tmp_path):
    partial = [tiny_model(), tmp_path / "out", "--scheme", "w8a8", "--ignore", "re:.*q_proj"]
    error = refusal("quantize", *partial)
    assert "--ignore: vLLM fuses model.layers.0.self_attn.q_proj" in error and "--no-vllm" in error
    qarl("quantize", *partial, "--no-vllm")
    stored = stored_tensors(tmp_path / "out")
    assert {name for name in stored if "q_proj" in name} == {
        f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1)
    }
    assert "model.layers.0.self_attn.k_proj.weight_scale" in stored
    run = save_run(tmp_path / "run", tiny_model(), scheme="w8a8", ignore=["lm_head", "re:.*up_proj"])
    error = refusal("export", run.path)
    assert "quant.ignore of the run: vLLM fuses" in error and "--dtype bf16" in error
    qarl("export", run.path, "--no-vllm")


REFUSED = {
    "group size that does not divide a layer": (
        ["--scheme", "w4a16", "--group-size", "128"],
        "--group-size: model.layers.0.self_attn",
    ),
    "unpacked fp8": (["--scheme", "fp8", "--unpacked"], "--unpacked: is for symmetric w4a16 and w4a8"),
    "unpacked w4a16": (["--scheme", "w4a16", "--unpacked"], "--unpacked: vLLM loads w4a16 packed only"),
    "nothing to ignore": (["--scheme", "fp8", "--ignore", "mlp"], "--ignore: 'mlp' matches no Linear layer"),
}


@pytest.mark.parametrize("options, reason", REFUSED.values(), ids=REFUSED.keys())
def test_quantize_refuses_what_the_format_cannot_express(options, reason, tiny_model, refusal, tmp_path):
    assert reason in refusal("quantize", tiny_model(), tmp_path / "out", *options)
    assert entries(tmp_path) == []
    assert "no such directory" in refusal("quantize", tmp_path / "gone", tmp_path / "out", "--scheme", "fp8")


def test_quantize_of_a_quantized_checkpoint_starts_from_its_values(tiny_model, qarl, tmp_path):
    qarl("quantize", tiny_model(), tmp_path / "once", "--scheme", "fp8")
    qarl("quantize", tmp_path / "once", tmp_path / "again", "--scheme", "fp8")
    once, again = (load_file(tmp_path / name / "model.safetensors") for name in ("once", "again"))
    assert once.keys() == again.keys()
    assert all(torch.equal(once[name].view(torch.uint8), again[name].view(torch.uint8)) for name in once)
    qarl("quantize", tmp_path / "once", tmp_path / "other", "--scheme", "w8a8")
    assert load_file(tmp_path / "other" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].dtype == torch.int8
