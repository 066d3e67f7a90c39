"""An exported directory that was changed after the export is refused by name, whatever was changed."""

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qarl.config import ModelConfig
from qarl.errors import UserError
from qarl.exporting.job import export_target
from qarl.inference.export_record import RECORD
from qarl.inference.masters import verify_base
from qarl.inference.opening import open_policy
from qarl.inference.target import resolve_target
from qarl.inputs.json import body_digest
from qarl.inputs.tensors import stored_tensors

SCHEMES: dict[str, dict[str, Any]] = {
    "asymmetric": {"scheme": "w4a16", "group_size": 32, "symmetric": False},
    "w8a8": {"scheme": "w8a8"},
    "nvfp4a16": {"scheme": "nvfp4a16"},
    "bf16": {"scheme": "bf16"},
}
KINDS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_global_scale", "weight_shape")


@pytest.fixture(scope="module")
def exports(tiny_model, tmp_path_factory):
    """exports(name) -> an export in that scheme of a model with lm_head and q/k norms, in several files."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("exports") / name
            target = resolve_target(str(tiny_model("qwen3")), quant=SCHEMES[name])
            export_target(target, made[name], dtype=torch.bfloat16, max_shard_bytes=60_000)
        return made[name]

    return make


@pytest.fixture
def copied(exports, tmp_path):
    return lambda name: Path(shutil.copytree(exports(name), tmp_path / name))


def opened(directory: Path, verify_digests: bool = True) -> None:
    open_policy(resolve_target(str(directory), verify_digests=verify_digests), device="cpu").close()


def refusal(directory: Path) -> str:
    """The line with which the directory is refused."""
    with pytest.raises(UserError) as caught:
        opened(directory)
    line = str(caught.value)
    assert "\n" not in line and "export it again" in line and "--no-verify-digests" in line
    return line


def kind_of(name: str) -> str:
    """Codes, scales, zero points, embeddings, norms, output layer."""
    suffix = name.rpartition(".")[2]
    if suffix in KINDS:
        return suffix
    return next((part for part in ("embed_tokens", "lm_head", "norm") if part in name), "weight")


@contextmanager
def changed(path: Path, content: bytes | None) -> Iterator[None]:
    """The file with other content, or none, until the block ends."""
    before = path.read_bytes() if path.exists() else None
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)
    yield
    path.unlink(missing_ok=True)
    if before is not None:
        path.write_bytes(before)


def flipped(path: Path, name: str, bit: int) -> bytes:
    """The file with one bit of a tensor flipped. bit: counted from the tensor's first byte, modulo its size."""
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[:8], "little")
    start, stop = json.loads(content[8 : 8 + size])[name]["data_offsets"]
    bit %= 8 * (stop - start)
    content[8 + size + start + bit // 8] ^= 1 << bit % 8
    return bytes(content)


@pytest.mark.parametrize("scheme", ["asymmetric", "nvfp4a16"])
def test_one_bit_of_any_kind_of_tensor(copied, scheme):
    directory, rng = copied(scheme), random.Random(scheme)
    by_kind: dict[str, list[str]] = {}
    for name in (found := stored_tensors(directory)):
        by_kind.setdefault(kind_of(name), []).append(name)
    assert {"embed_tokens", "lm_head", "norm"} < by_kind.keys()
    for names in by_kind.values():
        name = rng.choice(names)
        with changed(found[name].file, flipped(found[name].file, name, rng.randrange(2**32))):
            assert f"{found[name].file.name}: {name} is not the tensor" in refusal(directory)
    embedding = "model.embed_tokens.weight"  # its lowest bit, so that all values stay finite
    with changed(found[embedding].file, flipped(found[embedding].file, embedding, 0)):
        refusal(directory)
        opened(directory, verify_digests=False)
    opened(directory)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a JSON document, objects and lists included."""
    if path:
        yield path
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from leaves(value[key], (*path, key))


def test_an_edited_configuration_is_refused_by_key(copied):
    directory = copied("nvfp4a16")
    path = directory / "config.json"
    document = json.loads(path.read_text())
    removed = {key: value for key, value in document.items() if key != "hidden_act"}
    quantization = {"quantization_config": document["quantization_config"] | {"ignore": []}}
    for key, edited in (
        ("rms_norm_eps", document | {"rms_norm_eps": 1e-3}),
        ("hidden_act", removed),
        ("is_causal", document | {"is_causal": False}),
        ("quantization_config.ignore", document | quantization),
    ):
        with changed(path, json.dumps(edited).encode()), pytest.raises(UserError) as caught:
            resolve_target(str(directory))
        assert str(caught.value).startswith(f"{path}: {key}") and "--no-verify-digests" in str(caught.value)
    with changed(path, json.dumps(document).encode()):  # the same values, written differently
        opened(directory)


def test_tokenizer_and_template_changed_removed_or_added(copied):
    directory = copied("w8a8")
    files = json.loads((directory / RECORD).read_text())["files"]
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= files.keys()
    for name in files:
        content = (directory / name).read_bytes()
        for other in (content.replace(b"s", b"z", 1), content + b" ", None):
            with changed(directory / name, other):
                assert f"{name}: is " in refusal(directory)
    (directory / "additional_chat_templates").mkdir()
    for name in ("special_tokens_map.json", "added_tokens.json", "merges.txt", "additional_chat_templates/tool.jinja"):
        with changed(directory / name, b"{}"):
            assert f"{name}: was added after the export" in refusal(directory)
    for name in ("generation_config.json", "config.json"):
        with changed(directory / name, None), pytest.raises(UserError, match=f"{name}"):
            opened(directory)
    (directory / "README.md").write_text("a card of my own")
    (directory / "notes.json").write_text("{}")
    opened(directory)


def test_every_digest_is_used(copied):
    """Each digest of the record, replaced by another one, makes the untouched files differ from it."""
    directory = copied("bf16")
    contents = json.loads((directory / RECORD).read_text())
    places = [path for path in leaves(contents) if path[-1] == "sha256" and len(path) > 1]
    assert len(places) > 26
    for place in places:
        edited = json.loads(json.dumps(contents))
        edited[place[0]][place[1]]["sha256"] = "0" * 64
        with changed(directory / RECORD, json.dumps(edited).encode()):
            assert f"{directory / RECORD}: was changed" in refusal(directory)
        edited["sha256"] = body_digest(edited)
        with changed(directory / RECORD, json.dumps(edited).encode()):
            assert place[1] in refusal(directory)
    opened(directory)


def test_a_tensor_that_was_added(tiny_model, tmp_path, name="lm_head.weight"):
    """Also one that equals the embedding it is tied to."""
    target = resolve_target(str(tiny_model()), quant=SCHEMES["w8a8"])
    export_target(target, tmp_path / "out", dtype=torch.bfloat16, max_shard_bytes=10**9)
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {name: tensors["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    assert f"{name} is not in {RECORD}" in refusal(tmp_path / "out")
    opened(tmp_path / "out", verify_digests=False)


def test_exports_without_digests_open(copied):
    """An export of format 1 has those of the tensors alone; one of another program has no record."""
    directory = copied("w8a8")
    contents = json.loads((directory / RECORD).read_text())
    old = {key: contents[key] for key in ("packages", "run", "step", "model", "quant", "tensors")}
    (directory / RECORD).write_text(json.dumps({"format_version": 1, **old}))
    document = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(document | {"rms_norm_eps": 1e-3}))
    opened(directory)
    found = stored_tensors(directory)["lm_head.weight"].file
    with changed(found, flipped(found, "lm_head.weight", 0)):
        assert "lm_head.weight is not the tensor" in refusal(directory)
        (directory / RECORD).unlink()
        opened(directory)


def test_training_from_an_export_checks_it_first(qarl, copied, tmp_path):
    from tiny_runs import settings, write_config

    directory = copied("bf16")
    model = ModelConfig(path=str(directory))
    config = write_config(
        tmp_path / "c.yaml", settings(directory, train={"steps": 1, "run_dir": str(tmp_path / "run")})
    )
    files = stored_tensors(directory)
    name = list(files)[3]
    with changed(files[name].file, flipped(files[name].file, name, 1)):
        verify_base(model, 0, 2)  # the other rank's
        for check in (lambda: verify_base(model, 1, 2), lambda: verify_base(model)):
            with pytest.raises(UserError, match=rf"{name} is not the tensor .* set model\.verify_digests: false"):
                check()
        done = qarl.run("train", config)
        assert done.code == 2 and name in done.err and done.err.count("\n") == 1, done.err
        assert not list(tmp_path.glob("run/checkpoints/*"))
        verify_base(ModelConfig(path=str(directory), verify_digests=False))
    document = json.loads((directory / "config.json").read_text())
    with changed(directory / "config.json", json.dumps(document | {"rms_norm_eps": 1e-3}).encode()):
        with pytest.raises(UserError, match=r"rms_norm_eps is 0\.001, .* set model\.verify_digests: false"):
            verify_base(model, 1, 2)
        assert qarl.run("train", config, "model.verify_digests=false").code == 0


def test_every_command_checks_and_can_be_told_not_to(copied, tmp_path, run_command):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "2 + 2", "answer": "#### 4"}) + "\n")
    evaluation = ["--data", f"gsm8k={rows}", "--max-response-length", 4, "--samples", 1, "--out", tmp_path / "eval"]
    quantized, plain = copied("w8a8"), copied("bf16")
    for directory, command in (
        (quantized, ["generate", quantized, "--prompt", "hi", "--max-new-tokens", 2]),
        (quantized, ["eval", quantized, *evaluation]),
        (quantized, ["verify-exact", quantized, "--tokens", 8, "--longest", 16]),
        (plain, ["quantize", plain, tmp_path / "again", "--scheme", "w8a8"]),
    ):
        found = stored_tensors(directory)["model.norm.weight"].file
        with changed(found, flipped(found, "model.norm.weight", 0)):
            code, _, err = run_command(*command)
            (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
            assert code == 2 and "model.norm.weight is not the tensor" in line, command
    assert run_command(*command, "--no-verify-digests")[0] == 0
