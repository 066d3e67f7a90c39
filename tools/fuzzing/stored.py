"""Runs, models, exports and data that are damaged, forged or incomplete."""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import yaml
from fuzzing.base import COMPARE, EVALUATE, EVALUATE_GREEDILY, FILE_DATA, GENERATE, QUANTIZE, RUN, config, lay_out
from fuzzing.case import Case
from fuzzing.damage import damage_entry, damage_file, edit_record, parsed, seal
from fuzzing.values import chance, file_names, json_values, listed, make_traps, pick, position, shown, weighted
from hypothesis.strategies import DrawFn

Refusing = tuple[str, ...]  # commands that must refuse a run
READERS = {"runs": 5, "report": 2, "diagnose": 3, "generate": 3, "eval": 3, "export": 3, "compare": 2, "train": 6}
OPENERS = ("generate", "export", "eval")  # read the newest checkpoint's masters
LAST = "checkpoints/000003"
MODEL_LINES = {
    "generate": GENERATE.format("model"),
    "quantize": QUANTIZE,
    "compare": COMPARE,
    "eval": EVALUATE_GREEDILY.format("rows.jsonl"),
    "check": "check c.yaml",
    "train": "train c.yaml",
}


# --- models and exports


def mutate_model(draw: DrawFn, base: Path, case: Case) -> None:
    """A damaged model, export or file of rows for one of the commands that take one."""
    make_traps(case.cwd)
    lay_out(base, case, "model", "rows.jsonl", "export")
    model = case.cwd / "model"
    if chance(draw, 20):
        what, refuse = _damaged_path(draw, [case.cwd / "rows.jsonl"], chance(draw, 80)), False
        command = pick(draw, ("eval", "train"))
    elif chance(draw, 80):
        what, refuse, command = _damaged_tree(draw, model), False, pick(draw, list(MODEL_LINES))
    else:
        shutil.rmtree(model)
        model.with_name("export").rename(model)
        what, refuse = _damaged_export(draw, model)
        command = pick(draw, ("generate", "eval"))
    (case.cwd / "c.yaml").write_text(yaml.safe_dump(config(data=FILE_DATA)))
    case.mutation, case.argv, case.must_refuse = f"model: {what}", shlex.split(MODEL_LINES[command]), refuse


def _damaged_tree(draw: DrawFn, model: Path) -> str:
    """Damage something in a model's directory: a file, an entry, or a key of a document."""
    kind = pick(draw, ("file", "file", "entry", "key", "key", "key"))
    if kind != "key":
        return _damaged_path(draw, sorted(model.iterdir()), files=kind == "file")
    path = pick(draw, sorted(model.glob("*config.json")))
    what, text = edit_record(draw, json.loads(path.read_text()), draw(json_values))
    path.write_text(text)
    return f"{path.name} {what}"


def _damaged_path(draw: DrawFn, paths: list[Path], files: bool) -> str:
    return (damage_file if files else damage_entry)(draw, paths[position(draw, len(paths))])


def _damaged_export(draw: DrawFn, model: Path) -> tuple[str, bool]:
    """Damage an export. A changed bit, which a digest covers, must be refused."""
    if chance(draw, 60):
        return _damaged_tree(draw, model), False
    (file,) = model.glob("*.safetensors")
    raw = bytearray(file.read_bytes())
    data = 8 + int.from_bytes(raw[:8], "little")  # behind the header and its length
    raw[place := data + position(draw, len(raw) - data)] ^= 1
    file.write_bytes(raw)
    return f"bit flipped at {place}", True


# --- runs


def mutate_run(draw: DrawFn, base: Path, case: Case) -> None:
    """A damaged run for one of the commands that take one; `train` resumes it for one more step."""
    make_traps(case.cwd)
    lay_out(base, case)
    run, kind = case.cwd / RUN, pick(draw, list(RUN_DAMAGE))
    what, refusing = RUN_DAMAGE[kind](draw, run)
    command, target = weighted(draw, READERS), str(RUN)
    if command in (*OPENERS, "diagnose") and chance(draw, 15):
        target = f"{RUN}/checkpoints/{pick(draw, ('latest', '000003', '000001'))}"
    if command == "compare":
        shutil.copytree(base / RUN, case.cwd / "runs" / "whole", symlinks=True)
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
    line = EVALUATE if kind == "results" else lines[command]
    case.mutation, case.argv = f"run {kind}: {what}", shlex.split(line)
    case.must_refuse = command in refusing and target == str(RUN)


def _results(draw: DrawFn, run: Path) -> tuple[str, Refusing]:
    """Damage the results of an evaluation, which is run again."""
    return _damaged_path(draw, sorted((run.parents[1] / "results").glob("*.json*")), files=chance(draw, 75)), ()


def _file(draw: DrawFn, run: Path) -> tuple[str, Refusing]:
    """Damage a file as what it is; one of a checkpoint mostly with digests that fit."""
    records = listed("config.yaml  metrics.jsonl  evaluations.jsonl  environment.json  evaluations/000002.jsonl") * 2
    steps = listed("rollouts/{}.jsonl  rollouts/{}.safetensors  diagnostics/{}.json")
    files = listed("manifest.json  manifest.json  state.json  masters.safetensors  optimizer.safetensors")
    steps += [f"checkpoints/{{}}/{name}" for name in files]
    path = run / pick(draw, [*records, *steps]).format(pick(draw, ("000001", "000003", "000003")))
    before = path.read_bytes()
    what = f"{path.relative_to(run)} {damage_file(draw, path)}"
    if path.parent.parent.name == "checkpoints" and chance(draw, 80):
        seal(path.parent, files=path.name != "manifest.json")
        return f"{what}, digests fit", ()
    changed = before != path.read_bytes()
    if path.name == "manifest.json":  # in whose JSON a space between values means nothing
        changed = json.loads(before) != parsed(path.read_text(errors="replace"))
    digested = path.parent == run / LAST and path.name != "optimizer.safetensors"
    return what, OPENERS if digested and changed else ()


def _entry(draw: DrawFn, run: Path) -> tuple[str, Refusing]:
    """Replace an entry by something else of its name, or give it an unexpected name."""
    found = sorted(path for path in run.rglob("*") if path.is_symlink() or path.exists())
    path = found[position(draw, len(found))]
    name = draw(file_names).replace("/", "").replace("\0", "").strip(".")[:200]
    target = path.with_name(name.encode("utf-8", "replace").decode() + pick(draw, (path.suffix, "")) or "x")
    if chance(draw, 60) or target.exists() or target.is_symlink():
        return f"{path.relative_to(run)}: {damage_entry(draw, path)}", ()
    path.rename(target)
    return f"{path.relative_to(run)} renamed {shown(target.name)}", ()


RUN_DAMAGE: dict[str, Callable[[DrawFn, Path], tuple[str, Refusing]]] = {
    "file": _file,
    "entry": _entry,
    "results": _results,
}
