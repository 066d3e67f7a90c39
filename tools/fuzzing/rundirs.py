"""Run directories: records, configurations, rollouts and checkpoints that are damaged, forged or incomplete."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from fuzzing.base import EVALUATE, RESULTS, RUN, Base, lay_out
from fuzzing.case import Case
from fuzzing.checkpoints import OPENERS, change_manifest, change_state, change_tensors, forge_manifest
from fuzzing.documents import damage_entry, damage_json, damage_yaml, replaced
from fuzzing.paths import NAMES_OF_FILES, make_traps
from fuzzing.tensorfiles import damage_file, read_tensors, write_tensors
from fuzzing.values import shown

READERS = {"runs": 5, "report": 2, "diagnose": 3, "generate": 3, "eval": 3, "export": 3, "compare": 2, "train": 6}
PRECIOUS = "do not touch\n"


def mutate_run(rng: random.Random, base: Base, case: Case) -> None:
    """A damaged run for one of the commands that take one; `train` resumes it for one more step."""
    make_traps(case.cwd)
    lay_out(base, case, "run", "model", "data", "reward")
    run = case.cwd / RUN
    if rng.random() < 0.08:
        lay_out(base, case, "results")
        case.mutation, case.argv = f"results: {_results(rng, case.cwd / RESULTS)}", EVALUATE
        return
    kinds: dict[str, tuple[int, Callable[[random.Random, Path], tuple[str, tuple[str, ...]]]]] = {
        "config": (6, _config),
        "records": (16, _records),
        "history": (5, _history),
        "pages": (6, _pages),
        "rollouts": (6, _rollouts),
        "manifest": (6, change_manifest),
        "forged": (8, forge_manifest),
        "state": (6, change_state),
        "tensors": (8, change_tensors),
        "entry": (8, _entry),
        "names": (6, _names),
        "lock": (1, _lock),
        "inputs": (6, _inputs),
    }
    kind = rng.choices(list(kinds), [weight for weight, _ in kinds.values()])[0]
    what, refusing = kinds[kind][1](rng, run)
    command = rng.choices(list(READERS), list(READERS.values()))[0] if kind not in ("inputs", "lock") else "train"
    target = str(RUN)
    if command in (*OPENERS, "diagnose") and rng.random() < 0.15:
        target = f"{RUN}/checkpoints/{rng.choice(('latest', '000003', '000001'))}"
    case.argv = {
        "runs": ["runs", rng.choice(("runs", str(RUN))), *(["--json"] if rng.random() < 0.3 else [])],
        "report": ["report", target],
        "diagnose": [
            "diagnose",
            target,
            "--no-gradients",
            *(["--step", str(rng.choice((1, 2, 3, 99)))] if rng.random() < 0.3 else []),
        ],
        "generate": ["generate", target, "--prompt", "2 + 2 =", "--max-new-tokens", "4"],
        "eval": ["eval", target, "--samples", "1", "--temperature", "0", "--max-prompts", "2"],
        "export": ["export", target, "out"],
        "compare": ["compare", target, str(RUN), "--out", "out"],
        "train": ["train", f"{RUN}/config.yaml", "train.steps=4"],
    }[command]
    if command == "compare":
        shutil.copytree(base.run, case.cwd / "runs" / "whole", symlinks=True)
        case.argv[2] = "runs/whole"
    case.mutation = f"run {kind}: {what}"
    case.must_refuse = command in refusing and target == str(RUN)
    if kind == "lock":
        case.examine = _precious


def _config(rng: random.Random, run: Path) -> tuple[str, tuple[str, ...]]:
    path = run / "config.yaml"
    what, data = damage_yaml(rng, path.read_text())
    path.write_bytes(data)
    return f"config.yaml {what}", ()


def _records(rng: random.Random, run: Path) -> tuple[str, tuple[str, ...]]:
    """A line of a JSON-lines file, or environment.json, damaged or with a value of another type."""
    name = rng.choice(
        (
            "metrics.jsonl",
            "metrics.jsonl",
            "evaluations.jsonl",
            "evaluations.jsonl",
            "environment.json",
            "evaluations/000002.jsonl",
        )
    )
    path = run / name
    if rng.random() < 0.5 or name == "environment.json":
        what, data = damage_json(rng, path.read_text())
        path.write_bytes(data)
        return f"{name} {what}", ()
    lines = path.read_text().splitlines()
    row = int(rng.random() * len(lines))
    record = json.loads(lines[row])
    key, value = replaced(rng, record)
    lines[row] = json.dumps(record).replace('"@0@"', value)
    path.write_text("\n".join(lines) + "\n")
    return f"{name} line {row} {key} = {shown(value)}", ()


def _history(rng: random.Random, run: Path) -> tuple[str, tuple[str, ...]]:
    """Parts of the run's past gone."""
    kind = rng.choice(
        (
            "no checkpoints",
            "no metrics",
            "metrics cut in the middle",
            "metrics repeated",
            "metrics shuffled",
            "no first checkpoints",
            "no last checkpoint",
            "no rollouts",
            "ends early",
            "last line cut",
        )
    )
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    refusing: tuple[str, ...] = ()
    if kind == "no checkpoints":
        shutil.rmtree(run / "checkpoints")
        refusing = ("train", "generate", "export", "eval")
    elif kind == "no metrics":
        metrics.unlink()
        refusing = ("train",)
    elif kind == "metrics cut in the middle":
        metrics.write_text(lines[0] + lines[2])
        refusing = ("train",)
    elif kind == "metrics repeated":
        metrics.write_text("".join([lines[0], lines[1], lines[1], lines[2]]))
    elif kind == "metrics shuffled":
        metrics.write_text("".join([lines[2], lines[0], lines[1]]))
    elif kind == "no first checkpoints":
        shutil.rmtree(run / "checkpoints" / "000001")
    elif kind == "no last checkpoint":
        shutil.rmtree(run / "checkpoints" / "000003")
    elif kind == "no rollouts":
        shutil.rmtree(run / "rollouts")
    elif kind == "ends early":
        metrics.write_text(lines[0])
        refusing = ("train",)
    else:
        metrics.write_text("".join(lines)[: -1 - int(rng.random() * 100)])
    return kind, refusing


def _pages(rng: random.Random, run: Path) -> tuple[str, tuple[str, ...]]:
    """diagnostics/ and rollouts/*.jsonl as text."""
    name = rng.choice(
        ("diagnostics/000003.json", "diagnostics/000001.json", "rollouts/000003.jsonl", "rollouts/000001.jsonl")
    )
    path = run / name
    if name.endswith(".json") and rng.random() < 0.6:
        record = json.loads(path.read_text())
        key, value = replaced(rng, record)
        path.write_text(json.dumps(record).replace('"@0@"', value))
        return f"{name} {key} = {shown(value)}", ()
    what, data = damage_json(rng, path.read_text())
    path.write_bytes(data)
    return f"{name} {what}", ()


def _rollouts(rng: random.Random, run: Path) -> tuple[str, tuple[str, ...]]:
    path = run / "rollouts" / "000003.safetensors"
    if rng.random() < 0.5:
        return f"rollouts {damage_file(rng, path)}", ()
    tensors = read_tensors(path)
    names = list(tensors)
    name = names[int(rng.random() * len(names))]
    kind = rng.choice(("missing", "short", "swapped", "values"))
    if kind == "missing":
        del tensors[name]
    elif kind == "short" and tensors[name].shape:
        rows = tensors[name].shape[0]
        tensors[name].data = tensors[name].data[: len(tensors[name].data) // rows * (rows - 1)]
        tensors[name].shape = [rows - 1, *tensors[name].shape[1:]]
    elif kind == "swapped":
        other = names[int(rng.random() * len(names))]
        tensors[name], tensors[other] = tensors[other], tensors[name]
    else:
        tensors[name].data = rng.randbytes(len(tensors[name].data))
    write_tensors(path, tensors)
    return f"rollouts tensor {kind}: {name}", ()


def _entry(rng: random.Random, run: Path) -> tuple[str, tuple[str, ...]]:
    found = sorted(path for path in run.rglob("*") if path.is_symlink() or path.exists())
    path = found[int(rng.random() * len(found))]
    return f"{path.relative_to(run)}: {damage_entry(rng, path)}", ()


def _names(rng: random.Random, run: Path) -> tuple[str, tuple[str, ...]]:
    """Entries with names that nobody expects, beside or in place of the good ones."""
    folder = rng.choice(("checkpoints", "checkpoints", "rollouts", "diagnostics", "evaluations"))
    name = rng.choice(
        [n for n in NAMES_OF_FILES if n and "\0" not in n and "/" not in n and n not in (".", "..") and len(n) < 250]
    )
    name = name.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")
    good = sorted(path for path in (run / folder).iterdir() if not path.is_symlink())[-1]
    how = rng.choice(("renamed", "copied", "empty folder", "linked", "latest"))
    suffix = good.suffix if rng.random() < 0.8 else ""
    target = run / folder / f"{name}{suffix}"
    if how == "latest" and folder == "checkpoints":
        latest = run / folder / "latest"
        latest.unlink()
        os.symlink(rng.choice((".", "..", "000002", "latest", "/", "nowhere", "../..")), latest)
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
    return f"{folder}: {good.name} {how} as {shown(target.name)}", ()


def _lock(rng: random.Random, run: Path) -> tuple[str, tuple[str, ...]]:
    """The lock's file as a link to another file, which must stay as it is."""
    (run / ".lock").unlink(missing_ok=True)
    (run.parent.parent / "precious.txt").write_text(PRECIOUS)
    (run / ".lock").symlink_to("../../precious.txt")
    return "a link to a file", ()


def _precious(cwd: Path) -> str | None:
    kept = (cwd / "precious.txt").read_text() == PRECIOUS
    return None if kept else "the lock wrote through a link"


def _inputs(rng: random.Random, run: Path) -> tuple[str, tuple[str, ...]]:
    """What the run was started with is another now: a resumed run would be no run of either."""
    cwd = run.parent.parent
    kind = rng.choice(("reward", "answer", "prompt", "order", "rows", "weights", "tokenizer", "nothing"))
    rows = (cwd / "rows.jsonl").read_text().splitlines(keepends=True)
    if kind == "reward":
        (cwd / "reward.py").write_text((cwd / "reward.py").read_text().replace("% 3", "% 4"))
    elif kind == "answer":
        number = int(rng.random() * len(rows))
        row = json.loads(rows[number])
        rows[number] = json.dumps({**row, "answer": "99"}) + "\n"
    elif kind == "prompt":
        rows[0] = rows[0].replace("1 + 1", "1 + 9")
    elif kind == "order":
        rows = rows[::-1]
    elif kind == "rows":
        rows = rows[:-1]
    elif kind == "weights":
        tensors = read_tensors(cwd / "model" / "model.safetensors")
        name = sorted(tensors)[int(rng.random() * len(tensors))]
        tensors[name].data = bytes(4) + tensors[name].data[4:]
        write_tensors(cwd / "model" / "model.safetensors", tensors)
    elif kind == "tokenizer":
        path = cwd / "model" / "tokenizer.json"
        text = path.read_text().replace('"a":', '"@":', 1).replace('"b":', '"a":', 1)
        path.write_text(text.replace('"@":', '"b":', 1))
    (cwd / "rows.jsonl").write_text("".join(rows))
    return f"{kind} changed", ("train",) if kind != "nothing" else ()


def _results(rng: random.Random, results: Path) -> str:
    """A directory of results that an evaluation is to go on in."""
    found = sorted(path for path in results.iterdir() if path.suffix.startswith(".json"))
    path = found[int(rng.random() * len(found))]
    kind = rng.choice(("text", "value", "entry", "foreign"))
    if kind == "entry":
        return damage_entry(rng, path)
    if kind == "foreign":
        lines = (results / "completions.jsonl").read_text().splitlines()
        key = rng.choice(("task", "prompt_id", "sample", "reward", "correct", "tokens"))
        odd = (None, -1, "x", [], {}, 10**30, 1e308, float("nan"))
        rows = [{**json.loads(line), key: rng.choice(odd)} for line in lines]
        (results / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return f"completions.jsonl {key} = {rows[0][key]!r}"
    if kind == "text" or path.suffix == ".jsonl":
        what, data = damage_json(rng, path.read_text())
        path.write_bytes(data)
        return f"{path.name} {what}"
    record = json.loads(path.read_text())
    key, value = replaced(rng, record)
    path.write_text(json.dumps(record).replace('"@0@"', value))
    return f"{path.name} {key} = {shown(value)}"
