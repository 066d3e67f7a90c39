"""Runs that are damaged, forged or incomplete; other inputs for a resumed run or for a second rank."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, sampled_from

from fuzzing.base import EVALUATE, GENERATE, RUN, Base, lay_out
from fuzzing.case import Case
from fuzzing.damage import (
    damage_entry,
    damage_file,
    edit_record,
    flip_bit,
    lose_tensors,
    parsed,
    read_tensors,
    spoil_values,
    write_tensors,
)
from fuzzing.values import (
    chance,
    file_names,
    json_values,
    listed,
    make_traps,
    pick,
    position,
    shown,
    weighted,
)

READERS = {"runs": 5, "report": 2, "diagnose": 3, "generate": 3, "eval": 3, "export": 3, "compare": 2, "train": 6}
OPENERS = ("generate", "export", "eval")  # of the newest checkpoint's masters
LAST = "checkpoints/000003"
RUN_DAMAGE = {"file": 40, "tensors": 10, "forged": 8, "entry": 14, "history": 5, "inputs": 7, "results": 8}
Refusing = tuple[str, ...]  # commands that must refuse the run


def mutate_run(draw: DrawFn, base: Base, case: Case) -> None:
    """A damaged run for one of the commands that take one; `train` resumes it for one more step."""
    make_traps(case.cwd)
    lay_out(base, case, "run", "model", "data", "reward", "results")
    run, kind = case.cwd / RUN, weighted(draw, RUN_DAMAGE)
    if kind == "results":
        path = pick(draw, sorted((case.cwd / "results").glob("*.json*")))
        what = (damage_file if chance(draw, 75) else damage_entry)(draw, path)
        case.mutation, case.argv = f"results: {what}", shlex.split(EVALUATE)
        return
    changes = {
        "file": _file,
        "tensors": _tensors,
        "forged": _forged,
        "entry": _entry,
        "history": _history,
        "inputs": _inputs,
    }
    what, refusing = changes[kind](draw, run)
    command = "train" if kind == "inputs" else weighted(draw, READERS)
    target = str(RUN)
    if command in (*OPENERS, "diagnose") and chance(draw, 15):
        target = f"{RUN}/checkpoints/{pick(draw, ('latest', '000003', '000001'))}"
    if command == "compare":
        shutil.copytree(base.run, case.cwd / "runs" / "whole", symlinks=True)
    lines = {
        "runs": f"runs {pick(draw, ('runs', str(RUN)))}{pick(draw, ('', '', ' --json'))}",
        "report": f"report {target}",
        "diagnose": f"diagnose {target} --no-gradients{pick(draw, ('', '', ' --step 3', ' --step 99'))}",
        "generate": GENERATE.format(target),
        "eval": f"eval {target} --samples 1 --temperature 0 --max-prompts 2",
        "export": f"export {target} out",
        "compare": f"compare {RUN} runs/whole --out out",
        "train": f"train {RUN}/config.yaml train.steps=4",
    }
    case.mutation, case.argv = f"run {kind}: {what}", shlex.split(lines[command])
    case.must_refuse = command in refusing and target == str(RUN)


def _file(draw: DrawFn, run: Path) -> tuple[str, Refusing]:
    """A file damaged as what it is. Of a checkpoint's state, mostly with digests that fit."""
    records = listed("config.yaml  metrics.jsonl  evaluations.jsonl  environment.json  evaluations/000002.jsonl") * 2
    steps = listed("rollouts/{}.jsonl  rollouts/{}.safetensors  diagnostics/{}.json  checkpoints/{}/manifest.json")
    steps += listed(
        "checkpoints/{}/state.json  checkpoints/{}/masters.safetensors  checkpoints/{}/optimizer.safetensors"
    )
    path = run / pick(draw, [*records, *steps]).format(pick(draw, ("000001", "000003", "000003")))
    before = path.read_bytes()
    what = f"{path.relative_to(run)} {damage_file(draw, path)}"
    if path.name == "state.json" and chance(draw, 80):
        _seal_files(path.parent)
        return f"{what}, digests fit", ()
    digested = path.parent == run / LAST and path.name != "optimizer.safetensors"
    return what, OPENERS if digested and _means_other(before, path) else ()


def _means_other(before: bytes, path: Path) -> bool:
    """Whether a file's bytes changed, or a manifest's JSON, in which a space between values means nothing."""
    if path.name != "manifest.json":
        return before != path.read_bytes()
    return json.loads(before) != parsed(path.read_text(errors="replace"))


def _tensors(draw: DrawFn, run: Path) -> tuple[str, Refusing]:
    """Tensors lost, of other shapes, types or values, mostly with digests that fit."""
    names = ("rollouts/000003", f"{LAST}/masters", f"{LAST}/masters", f"{LAST}/optimizer")
    path = run / f"{pick(draw, names)}.safetensors"
    tensors, sealed = read_tensors(path), chance(draw, 80)
    refusing: Refusing = OPENERS if path.stem == "masters" else ()
    if refusing and chance(draw, 70):
        what = lose_tensors(draw, tensors)
        refusing = (*OPENERS, "train") if sealed else OPENERS
    else:
        what, _ = spoil_values(draw, tensors)
        if sealed and "zeros" in what:  # which they may have been; other codes than the run recorded if not
            refusing = ()
    write_tensors(path, tensors)
    if sealed and path.parent == run / LAST:
        _seal_files(path.parent)
        what = f"{what}, digests fit"
    return f"{path.name} {what}", refusing


def _forged(draw: DrawFn, run: Path) -> tuple[str, Refusing]:
    """A manifest with nonsense in it and a digest that fits."""
    path = run / pick(draw, (LAST, LAST, "checkpoints/000001")) / "manifest.json"
    manifest: Any = json.loads(path.read_text())
    if chance(draw, 30):
        elsewhere = sampled_from(("../000001/masters.safetensors", str((run / "config.yaml").resolve())))
        name = draw(file_names | elsewhere)
        manifest["groups"]["masters"] = [name]
        manifest["files"][name] = manifest["files"].pop("masters.safetensors")
        what = f"masters in {shown(name)}"
    else:
        pointed = ('["masters.safetensors"]', '{"masters": "x"}', '{"masters": ["no.safetensors"]}', '{"masters": []}')
        what, text = edit_record(draw, manifest, draw(json_values | sampled_from(pointed)))
        manifest = parsed(text)
    _seal(path, manifest)
    return f"{what}, its digest fits", ()


def _seal(path: Path, manifest: Any) -> None:
    """Write a manifest with the digest of itself. A manifest that is no JSON object has none."""
    if isinstance(manifest, dict):
        manifest.pop("sha256", None)
        manifest["sha256"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(manifest, indent=1))


def _seal_files(directory: Path) -> None:
    """Let the manifest's digests fit the files as they are."""
    manifest = json.loads((directory / "manifest.json").read_text())
    for name in manifest["files"]:
        raw = (directory / name).read_bytes()
        manifest["files"][name] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    _seal(directory / "manifest.json", manifest)


def _entry(draw: DrawFn, run: Path) -> tuple[str, Refusing]:
    """Something else of an entry's name, or an entry with a name that nobody expects."""
    found = sorted(path for path in run.rglob("*") if path.is_symlink() or path.exists())
    path = found[position(draw, len(found))]
    name = draw(file_names).replace("/", "").replace("\0", "").strip(".")[:200]
    target = path.with_name(name.encode("utf-8", "replace").decode() + pick(draw, (path.suffix, "")) or "x")
    if chance(draw, 60) or target.exists() or target.is_symlink():
        return f"{path.relative_to(run)}: {damage_entry(draw, path)}", ()
    path.rename(target)
    return f"{path.relative_to(run)} renamed {shown(target.name)}", ()


def _history(draw: DrawFn, run: Path) -> tuple[str, Refusing]:
    """Parts of the run's past gone."""
    metrics = run / "metrics.jsonl"
    first, second, third = metrics.read_text().splitlines(keepends=True)
    kept = {
        "cut in the middle": (first + third, ("train",)),
        "end early": (first, ("train",)),
        "repeated": (first + second + second + third, ()),
        "shuffled": (third + first + second, ()),
        "cut in the last line": ((first + second + third)[: -1 - position(draw, 100)], ()),
    }
    kind = pick(draw, (*kept, "checkpoints"))
    if kind == "checkpoints":
        shutil.rmtree(run / "checkpoints")
        return "no checkpoints", ("train", *OPENERS)
    metrics.write_text(kept[kind][0])
    return f"metrics {kind}", kept[kind][1]


def _inputs(draw: DrawFn, run: Path) -> tuple[str, Refusing]:
    """What the run was started with is another now: a resumed run would be no run of either."""
    kind = pick(draw, ("reward", "row", "order", "rows", "weight", "tokenizer", "nothing"))
    return _change_input(draw, run.parent.parent, kind), ("train",) if kind != "nothing" else ()


def mutate_ranks(draw: DrawFn, base: Base, case: Case) -> None:
    """Two ranks of a training run. The second finds another file at the same path, as on a second machine.

    A tenth of the cases change nothing, and must train.
    """
    lay_out(base, case, "model", "data", "reward", "objective")
    config = base.config(
        model={"path": "model"},
        data={"source": "rows.jsonl", "task": {}, "columns": {"prompt": "question"}},
        reward={"functions": [{"name": "reward.py:f"}]},
        objective={"name": "custom", "path": "objective.py:f"},
        train={"run_dir": str(case.cwd / RUN)},
        distributed={"timeout_s": 30},
    )
    (case.cwd / "c.yaml").write_text(yaml.safe_dump(config))
    case.second_rank = case.directory / "second"
    shutil.copytree(case.cwd, case.second_rank)
    case.argv = ["train", "c.yaml"]
    if chance(draw, 10):
        case.mutation, case.examine = "ranks: nothing differs", _trained
        return
    kind = pick(draw, ("reward", "objective", "row", "weight", "template", "generation", "config"))
    case.mutation = f"ranks {kind}: {_change_input(draw, case.second_rank, kind)}"
    case.must_refuse = True


def _trained(cwd: Path) -> str | None:
    return None if (cwd / RUN / "metrics.jsonl").is_file() else "ranks with the same inputs did not train"


# By input of a run: a file, a text in it, and what it becomes.
EDITS = {
    "reward": [("reward.py", "% 3", "% {}")],
    "objective": [("objective.py", "inputs.token_advantages *", "{} * inputs.token_advantages *")],
    "template": [("model/chat_template.jinja", "{% endif %}", "{{% endif %}}word{}")],
    "tokenizer": [("model/tokenizer.json", '"a": ', '"a{}": ')],
    "generation": [("model/generation_config.json", '"eos_token_id": 1', '"eos_token_id": 7')],
    "config": [
        ("model/config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": {}e-9'),
        ("model/config.json", '"rope_theta": 10000.0', '"rope_theta": {}.5'),
        ("model/config.json", '"num_attention_heads": 4', '"num_attention_heads": 8'),
        ("model/config.json", '"tie_word_embeddings": true', '"tie_word_embeddings": false'),
    ],
}


def _change_input(draw: DrawFn, cwd: Path, kind: str) -> str:
    """Change one input of a run so that it would train something else."""
    number = draw(st.integers(4, 10**6))
    what, rows = f"{kind} {number}", (cwd / "rows.jsonl").read_text().splitlines()
    if kind == "weight":
        tensors = read_tensors(cwd / "model/model.safetensors")
        what = flip_bit(draw, tensors)
        write_tensors(cwd / "model/model.safetensors", tensors)
    elif kind in ("row", "order", "rows"):
        place = pick(draw, range(len(rows)))
        changed = json.dumps({**json.loads(rows[place]), pick(draw, ("question", "answer")): str(100 + number)})
        others = {"row": [*rows[:place], changed, *rows[place + 1 :]], "order": rows[::-1], "rows": rows[:-1]}
        (cwd / "rows.jsonl").write_text("".join(f"{row}\n" for row in others[kind]))
    elif kind != "nothing":
        name, old, new = pick(draw, EDITS[kind])
        text = (cwd / name).read_text()
        assert old in text, f"{name} has no {old}"
        (cwd / name).write_text(text.replace(old, new.format(number), 1))
    return what


DAMAGE: dict[str, Callable[[DrawFn, Path], tuple[str, Refusing]]] = {
    "file": _file,
    "tensors": _tensors,
    "forged": _forged,
    "entry": _entry,
    "history": _history,
    "inputs": _inputs,
}
