"""A run resumes only with unchanged inputs, and names the changed ones, unless `allow_changed` permits them."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_runs import Finished, Qarl, settings, write_config
from whole_pieces import whole_pieces

import qarl
from qarl.diagnose.run import diagnose_run
from qarl.errors import UserError
from qarl.storage.checkpoint import CheckpointStore
from qarl.storage.loading import load_checkpoint
from qarl.training.run_identity import tensors_digest

pytestmark = pytest.mark.slow

JUDGE = "def judge(completions, prompts, **columns):\n    return [float(len(c)) for c in completions]\n"


@dataclass
class Place:
    qarl: Qarl
    folder: Path


@pytest.fixture(scope="module")
def trained(qarl, tiny_model, tmp_path_factory) -> Place:
    """A folder with a model, data, a reward, and a run of one step that uses them."""
    folder = tmp_path_factory.mktemp("inputs")
    shutil.copytree(tiny_model("llama"), folder / "model")
    (folder / "judge.py").write_text(JUDGE)
    rows = [{"prompt": f"{i} + {i} =", "answer": str(2 * i)} for i in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = settings(
        Path("model"),
        train={"steps": 1, "run_dir": "run"},
        logging={"tensorboard": False},
        reward={"functions": [{"name": "judge.py:judge"}]},
    )
    data["data"] = {"source": "rows.jsonl", "max_prompt_length": 64}
    write_config(folder / "c.yaml", data)
    assert qarl.run("train", "c.yaml", cwd=folder).code == 0
    return Place(qarl, folder)


def replace(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return change


def other_weights(folder: Path) -> None:
    tensors = load_file(folder / "model" / "model.safetensors")
    tensors["model.norm.weight"][3] += 2.0**-12
    save_file(tensors, folder / "model" / "model.safetensors", {"format": "pt"})


def other_stop_tokens(folder: Path) -> None:
    path = folder / "model" / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [1, 70]}))


def other_config(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "model" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


CHANGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "reward file": ("reward", replace("judge.py", "float(len(c))", "float(-len(c))"), "the source of `judge`"),
    "weights": ("model", other_weights, "model.path: its weights"),
    "chat template": (
        "data, model",
        replace("model/chat_template.jinja", "<|assistant|>", "<|answer|>"),
        "model.path: its chat template and the prompts",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_input_is_refused_by_name_unless_it_may_change(trained, name, tmp_path):
    kind, change, what = CHANGES[name]
    shutil.copytree(trained.folder, tmp_path, symlinks=True, dirs_exist_ok=True)

    def train(*overrides: str) -> Finished:
        return trained.qarl.run("train", "c.yaml", *overrides, cwd=tmp_path)

    change(tmp_path)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    done = train("train.steps=2")
    assert done.code == 2 and done.err.count("\n") == 1, done.err
    pattern = (
        rf"error: .*/checkpoints/000001: .*{what}.* changed since it was saved; .*checkpoint\.allow_changed: \[{kind}\]"
    )
    assert re.match(pattern, done.err), done.err
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    if name != "reward file":
        return
    assert train("train.steps=2", "checkpoint.allow_changed=[data, model]").code == 2
    done = train("train.steps=2", "checkpoint.allow_changed=[reward]")
    assert done.code == 0, done.err
    assert "changed since the checkpoint of step 1" in done.out and "step 2/2" in done.out
    assert train("train.steps=3").code == 0  # the new input is the run's own now


COMMANDS: dict[str, Callable[[], object]] = {
    "export": lambda: qarl.export("run", "out"),
    "export of a moved base": lambda: qarl.export("run", "out", model="moved"),
    "generate": lambda: qarl.generate("run", "1 + 1 ="),
    "eval": lambda: qarl.evaluate("run", samples=1, max_prompts=1, console="none"),
    "verify-exact": lambda: qarl.verify_exact("run", tokens=8, longest=32, sequences=2, device="cpu"),
    "diagnose": lambda: diagnose_run(
        Path("run"), step=None, device="cpu", gradients=False, out=None, model=None, say=lambda line: None
    ),
}
OPENED: dict[str, tuple[Callable[[Path], None], str]] = {
    "epsilon": (other_config(rms_norm_eps=1e-3), r"config\.json: rms_norm_eps \(now 0\.001, was 1e-06\)"),
    "template": (replace("model/chat_template.jinja", "<|assistant|>", "<|answer|>"), "its chat template"),
    "normalizer": (replace("model/tokenizer.json", '"normalizer": null', '"normalizer": {"type": "NFC"}'), "tokenizer"),
    "end": (other_stop_tokens, r"generation_config\.json: eos_token_id \(now \[1, 70\], was 1\)"),
}


@pytest.mark.parametrize(("number", "command"), list(enumerate(COMMANDS)))
def test_a_run_is_opened_only_with_the_model_that_it_had(trained, number, command, tmp_path, monkeypatch):
    change, what = list(OPENED.values())[number % 4]
    shutil.copytree(trained.folder, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    change(tmp_path)
    if "moved" in command:
        (tmp_path / "model").rename(tmp_path / "moved")
    with pytest.raises(UserError, match=rf"/checkpoints/000001: .*model\.path: .*{what}.* changed since") as refused:
        COMMANDS[command]()
    assert "\n" not in str(refused.value) and "--model" in str(refused.value)
    assert not list(tmp_path.glob("out")) + list(tmp_path.glob("run/eval/*/results.json"))


def test_edits_that_change_nothing_are_accepted(trained, tmp_path, monkeypatch):
    shutil.copytree(trained.folder, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    other_config(transformers_version="4.40.0", dtype="bfloat16", use_cache=False, a_note="x")(Path())
    COMMANDS["export"]()


def test_digests_are_kept_for_people_and_an_older_checkpoint_is_taken_as_it_is(trained, tmp_path):
    shutil.copytree(trained.folder, tmp_path, symlinks=True, dirs_exist_ok=True)
    inputs = json.loads((tmp_path / "run" / "environment.json").read_text())["inputs"]
    assert inputs.keys() == {"model", "reward", "config.json", "generation_config.json", "files"}
    assert len(inputs["files"]["model.path: model.safetensors"]) == len(inputs["model"]["weights"]) == 64
    store = CheckpointStore(tmp_path / "run" / "checkpoints", 0)
    found = load_checkpoint(store.path(1))
    tensors = {group: {k: v.clone() for k, v in members.items()} for group, members in found.tensors.items()}
    state = {key: value for key, value in found.state.items() if key not in ("inputs", "model_files")}
    del state["data"]["columns_fingerprint"]
    store.save(1, whole_pieces(tensors), state)
    other_weights(tmp_path)
    done = trained.qarl.run("train", "c.yaml", "train.steps=2", cwd=tmp_path)
    assert done.code == 0, done.err


def test_the_digest_of_tensors_is_that_of_their_bits_names_and_shapes():
    one = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)}
    digest = tensors_digest(one.items())
    assert digest == tensors_digest({name: t.clone() for name, t in one.items()}.items())
    assert digest == tensors_digest({"a": one["a"].T.contiguous().T, "b": one["b"]}.items())
    for other in (
        {**one, "a": one["a"].reshape(3, 2)},
        {**one, "b": -one["b"]},
        {"b": one["b"], "a": one["a"]},
        {"a": one["a"], "c": one["b"]},
        {**one, "b": one["b"].double()},
    ):
        assert digest != tensors_digest(other.items())
