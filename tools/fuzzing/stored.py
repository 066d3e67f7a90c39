"""Runs, models, exports and data that are damaged, forged or incomplete."""

import json
import shlex
import shutil
from pathlib import Path

import yaml
from fuzzing.base import COMPARE, EVALUATE_GREEDILY, FILE_DATA, GENERATE, QUANTIZE, RUN, config, lay_out
from fuzzing.case import Case
from fuzzing.damage import damage_entry, damage_file, edit_record, parsed, seal
from fuzzing.values import chance, json_values, pick, position
from hypothesis.strategies import DrawFn

READERS = ("runs", "report", "diagnose", "generate", "eval", "export", "compare", "train", "train")
OPENERS = ("generate", "export", "eval")  # read the newest checkpoint's masters
MODEL_LINES = {
    "generate": GENERATE.format("model"),
    "quantize": QUANTIZE,
    "compare": COMPARE,
    "eval": EVALUATE_GREEDILY.format("rows.jsonl"),
    "check": "check c.yaml",
    "train": "train c.yaml",
}


def mutate_model(draw: DrawFn, base: Path, case: Case) -> None:
    """Make a case: a command that reads a damaged model, export or data file."""
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
    raw[place := data + position(draw, len(raw) - data)] ^= 1  # a bit of a tensor
    file.write_bytes(raw)
    return f"bit flipped at {place}", True


def mutate_run(draw: DrawFn, base: Path, case: Case) -> None:
    """Make a case: a command that reads a damaged run; `train` resumes it for one more step.

    Damaged files of checkpoints usually get matching digests.
    """
    lay_out(base, case)
    run, newest = case.cwd / RUN, case.cwd / RUN / "checkpoints/000003"
    found = sorted(path for path in run.rglob("*") if path.is_symlink() or path.exists())
    path = found[position(draw, len(found))]
    is_file = path.is_file() and chance(draw, 75)
    before = path.read_bytes() if is_file else b""
    what = _damaged_path(draw, [path], files=is_file)
    if sealed := is_file and path.parent.parent.name == "checkpoints" and chance(draw, 80):
        seal(path.parent, files=path.name != "manifest.json")
        what = f"{what}, digests fit"
    command, target = pick(draw, READERS), str(RUN)
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
    case.mutation, case.argv = f"run: {path.relative_to(run)}: {what}", shlex.split(lines[command])
    changed = is_file and path.read_bytes() != before
    if path.name == "manifest.json" and is_file:  # added white space does not change its JSON
        changed = json.loads(before) != parsed(path.read_text(errors="replace"))
    digested = path.parent == newest and path.name != "optimizer.safetensors" and target == str(RUN)
    case.must_refuse = command in OPENERS and digested and changed and not sealed
