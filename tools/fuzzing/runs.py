"""Runs that are damaged, forged or incomplete; other inputs for a resumed run or for a second rank."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, sampled_from

from fuzzing.base import EVALUATE, GENERATE, RESULTS, RUN, Base, lay_out
from fuzzing.case import Case
from fuzzing.damage import (
    damage_entry,
    damage_file,
    edit_record,
    flip_bit,
    lose_tensors,
    read_tensors,
    spoil_values,
    write_tensors,
)
from fuzzing.values import chance, file_names, json_values, make_traps, pick, position, shown, weighted

READERS = {"runs": 5, "report": 2, "diagnose": 3, "generate": 3, "eval": 3, "export": 3, "compare": 2, "train": 6}
OPENERS = ("generate", "export", "eval")  # of the newest checkpoint's masters
LAST = "checkpoints/000003"
PRECIOUS = "do not touch\n"
Refusing = tuple[str, ...]  # commands that must refuse the run


def mutate_run(draw: DrawFn, base: Base, case: Case) -> None:
    """A damaged run for one of the commands that take one; `train` resumes it for one more step."""
    make_traps(case.cwd)
    lay_out(base, case, "run", "model", "data", "reward")
    if chance(draw, 8):
        lay_out(base, case, "results")
        case.mutation, case.argv = f"results: {_results(draw, case.cwd / RESULTS)}", shlex.split(EVALUATE)
        return
    kind = pick(draw, [name for name, (weight, _) in DAMAGE.items() for _ in range(weight)])
    what, refusing = DAMAGE[kind][1](draw, case.cwd / RUN)
    command = "train" if kind in ("inputs", "lock") else weighted(draw, READERS)
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
    if kind == "lock":
        case.examine = _precious


def _file(draw: DrawFn, run: Path) -> tuple[str, Refusing]:
    """A file damaged as what it is. Of a checkpoint's state, mostly with digests that fit."""
    steps = ("rollouts/{}.jsonl", "rollouts/{}.safetensors", "diagnostics/{}.json", "checkpoints/{}/manifest.json")
    steps += tuple(
        f"checkpoints/{{}}/{name}" for name in ("state.json", "masters.safetensors", "optimizer.safetensors")
    )
    records = ("config.yaml", "metrics.jsonl", "evaluations.jsonl", "environment.json", "evaluations/000002.jsonl")
    path = run / pick(draw, [*records, *records, *steps, *steps]).format(pick(draw, ("000001", "000003", "000003")))
    before = path.read_bytes()
    what = f"{path.relative_to(run)} {damage_file(draw, path)}"
    if path.name == "state.json" and chance(draw, 80):
        _seal_files(path.parent)
        return f"{what}, digests fit", ()
    digested = path.parent == run / LAST and path.name != "optimizer.safetensors"
    changed = _means_other(before, path) if path.name == "manifest.json" else before != path.read_bytes()
    return what, OPENERS if digested and changed else ()


def _means_other(before: bytes, path: Path) -> bool:
    """Whether the JSON changed; a carriage return between values, say, changes nothing."""
    try:
        return json.loads(before) != json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return True


def _history(draw: DrawFn, run: Path) -> tuple[str, Refusing]:
    """Parts of the run's past gone."""
    metrics, checkpoints = run / "metrics.jsonl", run / "checkpoints"
    first, second, third = metrics.read_text().splitlines(keepends=True)
    cut = (first + second + third)[: -1 - position(draw, 100)]
    kinds: dict[str, tuple[Callable[[], object], Refusing]] = {
        "no checkpoints": (lambda: shutil.rmtree(checkpoints), ("train", *OPENERS)),
        "no first checkpoint": (lambda: shutil.rmtree(checkpoints / "000001"), ()),
        "no last checkpoint": (lambda: shutil.rmtree(run / LAST), ()),
        "no rollouts": (lambda: shutil.rmtree(run / "rollouts"), ()),
        "no metrics": (metrics.unlink, ("train",)),
        "metrics end early": (lambda: metrics.write_text(first), ("train",)),
        "metrics cut in the middle": (lambda: metrics.write_text(first + third), ("train",)),
        "metrics repeated": (lambda: metrics.write_text(first + second + second + third), ()),
        "metrics shuffled": (lambda: metrics.write_text(third + first + second), ()),
        "last line cut": (lambda: metrics.write_text(cut), ()),
    }
    kind = pick(draw, list(kinds))
    change, refusing = kinds[kind]
    change()
    return kind, refusing


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
        try:
            manifest = json.loads(text)
        except (ValueError, RecursionError):
            path.write_text(text)
            return f"{path.parent.name}/manifest.json {what}, not JSON", ()
    _seal(path, manifest)
    return f"{path.parent.name}/manifest.json {what}, its digest fits", ()


def _seal(path: Path, manifest: Any) -> None:
    """Write a manifest with the digest of itself."""
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


def _entry(draw: DrawFn, run: Path) -> tuple[str, Refusing]:
    found = sorted(path for path in run.rglob("*") if path.is_symlink() or path.exists())
    path = found[position(draw, len(found))]
    return f"{path.relative_to(run)}: {damage_entry(draw, path)}", ()


def _names(draw: DrawFn, run: Path) -> tuple[str, Refusing]:
    """Entries with names that nobody expects, beside or in place of the good ones."""
    folder = run / pick(draw, ("checkpoints", "checkpoints", "rollouts", "diagnostics", "evaluations"))
    name = draw(file_names.filter(lambda n: n not in ("", ".", "..") and not set(n) & set("\0/") and len(n) < 250))
    name = name.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")
    good = sorted(path for path in folder.iterdir() if not path.is_symlink())[-1]
    target = folder / f"{name}{good.suffix if chance(draw, 80) else ''}"
    how = pick(draw, ("renamed", "copied", "empty folder", "linked", "latest"))
    if how == "latest" and folder.name == "checkpoints":
        (folder / "latest").unlink()
        os.symlink(pick(draw, (".", "..", "000002", "latest", "/", "nowhere", "../..")), folder / "latest")
    elif target.exists() or target.is_symlink():
        how = "left alone"
    elif how == "renamed":
        good.rename(target)
    elif how == "copied":
        (shutil.copytree if good.is_dir() else shutil.copyfile)(good, target)
    elif how == "empty folder":
        target.mkdir()
    else:
        target.symlink_to(good.name)
    return f"{folder.name}: {good.name} {how} as {shown(target.name)}", ()


def _lock(draw: DrawFn, run: Path) -> tuple[str, Refusing]:
    """The lock's file as a link to another file, which must stay as it is."""
    (run / ".lock").unlink(missing_ok=True)
    (run.parent.parent / "precious.txt").write_text(PRECIOUS)
    (run / ".lock").symlink_to("../../precious.txt")
    return "a link to a file", ()


def _precious(cwd: Path) -> str | None:
    kept = (cwd / "precious.txt").read_text() == PRECIOUS
    return None if kept else "the lock wrote through a link"


def _results(draw: DrawFn, results: Path) -> str:
    """A directory of results that an evaluation is to go on in."""
    path = pick(draw, sorted(path for path in results.iterdir() if path.suffix.startswith(".json")))
    return damage_entry(draw, path) if chance(draw, 25) else damage_file(draw, path)


def _inputs(draw: DrawFn, run: Path) -> tuple[str, Refusing]:
    """What the run was started with is another now: a resumed run would be no run of either."""
    kind = pick(draw, ("reward", "row", "order", "rows", "weight", "tokenizer", "nothing"))
    if kind == "nothing":
        return "nothing changed", ()
    return f"{kind}: {_change_input(draw, run.parent.parent, kind)}", ("train",)


def mutate_ranks(draw: DrawFn, base: Base, case: Case) -> None:
    """Two ranks of a training run. The second finds another file at the same path, as on a second machine.

    A tenth of the cases change nothing, and must train.
    """
    lay_out(base, case, "model", "data", "reward", "objective")
    config = base.config(
        model={"path": "model"},
        data={"source": "rows.jsonl", "columns": {"prompt": "question"}},
        reward={"functions": [{"name": "reward.py:f"}]},
        objective={"name": "custom", "path": "objective.py:f"},
        train={"run_dir": str(case.cwd / RUN)},
        distributed={"timeout_s": 30},
    )
    del config["data"]["task"]
    (case.cwd / "c.yaml").write_text(yaml.safe_dump(config))
    case.second_rank = case.directory / "second"
    shutil.copytree(case.cwd, case.second_rank)
    case.argv = ["train", "c.yaml"]
    if chance(draw, 10):
        case.mutation, case.examine = "ranks: nothing differs", _trained
        return
    kind = pick(draw, ("reward", "objective", "row", "weight", "template", "generation_config.json", "config.json"))
    case.mutation = f"ranks {kind}: {_change_input(draw, case.second_rank, kind)}"
    case.must_refuse = True


def _trained(cwd: Path) -> str | None:
    return None if (cwd / RUN / "metrics.jsonl").is_file() else "ranks with the same inputs did not train"


def _change_input(draw: DrawFn, cwd: Path, kind: str) -> str:
    """Change one input of a run so that it would train something else."""
    number = draw(st.integers(4, 10**6))
    rows, model = (cwd / "rows.jsonl").read_text().splitlines(), cwd / "model"
    edits = {
        "reward": ("reward.py", "% 3", f"% {number}"),
        "objective": ("objective.py", "inputs.token_advantages *", f"{number} * inputs.token_advantages *"),
        "template": ("model/chat_template.jinja", "{% endif %}", f"{{% endif %}}word{number}"),
    }
    if kind in edits:
        name, old, new = edits[kind]
        (cwd / name).write_text((cwd / name).read_text().replace(old, new))
        return f"{old} becomes {new}"
    if kind == "tokenizer":
        tokenizer = json.loads((model / "tokenizer.json").read_text())
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        (model / "tokenizer.json").write_text(json.dumps(tokenizer))
        return "a and b swapped"
    if kind == "weight":
        tensors = read_tensors(model / "model.safetensors")
        what = flip_bit(draw, tensors)
        write_tensors(model / "model.safetensors", tensors)
        return what
    if kind.endswith(".json"):
        values = {
            "eos_token_id": [1, 3 + number % 256],
            "rms_norm_eps": 1e-5 + number * 1e-9,
            "rope_parameters": {"rope_type": "default", "rope_theta": 2e4 + number},
            "num_attention_heads": 8,
            "tie_word_embeddings": False,
        }
        key = "eos_token_id" if kind.startswith("generation") else pick(draw, list(values)[1:])
        (model / kind).write_text(json.dumps(json.loads((model / kind).read_text()) | {key: values[key]}))
        return f"{key} = {values[key]}"
    if kind == "row":
        place, column = pick(draw, range(len(rows))), pick(draw, ("question", "answer"))
        rows[place] = json.dumps({**json.loads(rows[place]), column: str(100 + number)})
    else:
        rows = rows[::-1] if kind == "order" else rows[:-1]
    (cwd / "rows.jsonl").write_text("".join(f"{row}\n" for row in rows))
    return f"with {number}" if kind == "row" else kind


DAMAGE: dict[str, tuple[int, Callable[[DrawFn, Path], tuple[str, Refusing]]]] = {
    "file": (38, _file),
    "history": (5, _history),
    "forged": (8, _forged),
    "tensors": (10, _tensors),
    "entry": (8, _entry),
    "names": (6, _names),
    "lock": (1, _lock),
    "inputs": (6, _inputs),
}
