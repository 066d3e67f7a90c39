"""Checkpoints of a run: manifests that are changed or forged, states and tensors of other shapes."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

from fuzzing.documents import damage_bytes, damage_json, replaced
from fuzzing.paths import NAMES_OF_FILES
from fuzzing.tensorfiles import damage_file, lose_tensors, read_tensors, spoil_values, write_tensors
from fuzzing.values import shown

OPENERS = ("generate", "export", "eval")  # of the newest checkpoint's masters
LAST = 3  # step of the base's newest checkpoint


def _checkpoint(rng: random.Random, run: Path) -> Path:
    return run / "checkpoints" / f"{rng.choice((LAST, LAST, LAST, 1)):06d}"


def change_manifest(rng: random.Random, run: Path) -> tuple[str, tuple[str, ...]]:
    """Changed after it was written, so that its own digest is wrong."""
    path = _checkpoint(rng, run) / "manifest.json"
    text = path.read_text()
    what, data = damage_json(rng, text)
    path.write_bytes(data)
    newest = path.parent.name == f"{LAST:06d}"
    return f"{path.parent.name}/manifest.json {what}", OPENERS if newest and _means_other(text, data) else ()


def _means_other(before: str, after: bytes) -> bool:
    """Whether the damage changed what the JSON says; a carriage return between values, say, does not."""
    try:
        return json.loads(before) != json.loads(after)
    except (ValueError, RecursionError):
        return True


def forge_manifest(rng: random.Random, run: Path) -> tuple[str, tuple[str, ...]]:
    """A manifest with nonsense in it and a digest that fits."""
    directory = _checkpoint(rng, run)
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    if rng.random() < 0.5:
        key = rng.choice(("files", "groups", "step", "format_version"))
        value = rng.choice(
            (
                None,
                [],
                {},
                "x",
                5,
                -1,
                10**30,
                1e308,
                True,
                ["masters.safetensors"],
                {"masters": "x"},
                {"masters": [5]},
                {"masters": []},
                {"masters": ["nosuch.safetensors"]},
                {"masters.safetensors": 5},
                {"masters.safetensors": {}},
            )
        )
        if rng.random() < 0.3:
            manifest.pop(key)
            what = f"without {key}"
        else:
            manifest[key] = value
            what = f"{key} = {value!r}"
    elif rng.random() < 0.5:
        name = rng.choice((*NAMES_OF_FILES, "../000001/masters.safetensors", str((run / "config.yaml").resolve())))
        manifest["groups"]["masters"] = [name]
        manifest["files"][name] = manifest["files"].pop("masters.safetensors")
        what = f"masters in {shown(name)}"
    else:
        key, value = replaced(rng, manifest)
        text = json.dumps(manifest).replace('"@0@"', value)
        try:
            manifest = json.loads(text)
        except (ValueError, RecursionError):
            path.write_text(text)
            return f"{directory.name}/manifest.json {key} = {shown(value)}, not JSON", ()
        what = f"{key} = {shown(value)}"
    _write_manifest(path, manifest)
    return f"{directory.name}/manifest.json {what}, its digest fits", ()


def _write_manifest(path: Path, manifest: Any) -> None:
    if isinstance(manifest, dict):
        manifest.pop("sha256", None)
        manifest["sha256"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(manifest, indent=1))


def _resealed(directory: Path) -> None:
    """Let the manifest's digests fit the files as they are."""
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    for name in manifest["files"]:
        raw = (directory / name).read_bytes()
        manifest["files"][name] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    _write_manifest(path, manifest)


def change_state(rng: random.Random, run: Path) -> tuple[str, tuple[str, ...]]:
    """state.json with a value of another type; mostly with digests that fit."""
    directory = run / "checkpoints" / f"{LAST:06d}"
    path = directory / "state.json"
    if rng.random() < 0.3:
        what, data = damage_json(rng, path.read_text())
    else:
        state = json.loads(path.read_text())
        key, value = replaced(rng, state)
        what, data = f"{key} = {shown(value)}", json.dumps(state).replace('"@0@"', value).encode()
    changed = data != path.read_bytes()
    path.write_bytes(data)
    if rng.random() < 0.8:
        _resealed(directory)
        return f"state.json {what}, digests fit", ()
    return f"state.json {what}", OPENERS if changed else ()


def change_tensors(rng: random.Random, run: Path) -> tuple[str, tuple[str, ...]]:
    """Masters or optimizer state damaged; with digests that fit, tensors lost or of other shapes."""
    directory = run / "checkpoints" / f"{LAST:06d}"
    name = rng.choice(("masters.safetensors", "masters.safetensors", "optimizer.safetensors"))
    path = directory / name
    masters = name.startswith("masters")
    if rng.random() < 0.4:
        before = path.read_bytes()
        what, data = damage_bytes(rng, before)
        path.write_bytes(data)
        return f"{name} {what}", OPENERS if masters and data != before else ()
    tensors = read_tensors(path)
    if masters and rng.random() < 0.7:
        what = lose_tensors(rng, tensors)
        refusing = (*OPENERS, "train")
    else:
        what, _ = spoil_values(rng, tensors)
        refusing = OPENERS if masters else ()  # other codes than the run recorded
        refusing = refusing if "zeros" not in what else ()  # which they may have been
    if rng.random() < 0.2:
        write_tensors(path, tensors)
        return f"{name} {what}", OPENERS if masters else ()
    write_tensors(path, tensors)
    if rng.random() < 0.2:
        what = f"{what}, {damage_file(rng, path)}"
        refusing = ()
    _resealed(directory)
    return f"{name} {what}, digests fit", refusing
