"""Datasets: json, jsonl, csv, parquet and directories of them, damaged or of shapes that nobody expects."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from fuzzing.base import ROWS, Base, greedy_evaluation
from fuzzing.case import Case
from fuzzing.documents import damage_bytes, damage_entry, damage_json
from fuzzing.paths import make_traps
from fuzzing.values import TEXTS, json_value, shown

CHAT = [{"role": "user", "content": "2 + 2 ="}]
TEMPLATES = (
    "{question} =",
    "{question:>99999999999}",
    "{question!r}",
    "{answer:{answer}}",
    "{question.__class__}",
    "{question[0]}",
    "{nosuch}",
    "{question:1000000000}",
    "{answer:d}",
    "{answer:,.99999999f}",
    "{question}" * 2_000,
    "\ud800{question}",
    "{question:\0>9}",
)
# JSON of a value in the cell of a row: what appears in datasets, and what only an enemy writes.
CELLS: tuple[str, ...] = (
    "null",
    "true",
    "3",
    "-0.0",
    "1e308",
    "NaN",
    "Infinity",
    "9" * 400,
    "9" * 5_000,
    "1e400",
    '""',
    '" "',
    '"\\ud800"',
    '"\\udc80 x"',
    '"\\u0000"',
    '"\\u202e"',
    '"\\u001b[31m"',
    json.dumps("x" * 200_000),
    json.dumps("9" * 5_000),
    json.dumps("é\n" * 1_000),
    "[]",
    "{}",
    "[1, 2]",
    '["a"]',
    "[" * 1_000 + "]" * 1_000,
    '{"a":' * 1_000 + "1" + "}" * 1_000,
    json.dumps(CHAT),
    '[{"role": "user", "content": null}]',
    '[{"role": "user", "content": [{"type": "text", "text": "2 + 2 ="}]}]',
    '[{"role": "user", "content": [{"type": "image"}]}]',
    '[{"role": "user", "content": 5}]',
    '[{"role": null, "content": "x"}]',
    '[{"role": ["user"], "content": "x"}]',
    '[{"role": "user"}]',
    '[{"role": "assistant", "content": "x"}, {"role": "system", "content": "y"}]',
    '[{"role": "user", "content": "\\ud800"}]',
    '[{"role": "\\u001b[31m", "content": {"a": 1}}]',
    '[{"role": "tool", "content": "x", "tool_calls": [{"function": null}]}]',
    "[[]]",
    "[null]",
    '{"role": "user", "content": "x"}',
    '{"ground_truth": "4"}',
    '"#### 4"',
    '"\\\\boxed{4}"',
    '"\\\\boxed{' + "{" * 500 + '"',
    '"\\\\frac{1}{0}"',
    '"2^{2^{2^{2^{99}}}}"',
    '"9**9**9**9"',
    '"' + "(" * 5_000 + '"',
)
NAMES = (
    "prompt",
    "question",
    "answer",
    "completions",
    "prompts",
    "self",
    "",
    " ",
    "a b",
    "\x1b[31m",
    "\u202e",
    "\ud800",
    "__class__",
    "n" * 5_000,
    "completion_ids",
    "options",
    "columns",
    "0",
    "class",
)


def mutate_dataset(rng: random.Random, base: Base, case: Case) -> None:
    """One step of training on it, or an evaluation."""
    make_traps(case.cwd)
    kind = rng.choice(
        ("cell", "cell", "cell", "name", "shape", "text", "text", "csv", "parquet", "directory", "entry", "template")
    )
    data: dict[str, Any] = {"columns": {"prompt": "question"}, "task": {}, "source": "rows.jsonl"}
    what, source = WRITERS[kind](rng, case.cwd)
    data["source"] = source
    if kind == "template" or rng.random() < 0.15:
        template = rng.choice(TEMPLATES)
        data["prompt_template"] = template
        what = f"{what}; template {shown(template)}"
    if rng.random() < 0.3:
        data["chat_template"] = False
    if rng.random() < 0.1:
        data["split"] = rng.choice(("test", "train", "\x1b[31m", "nosuch", "..", "\ud800"))
    reward = rng.choice(("length", "math", "exact", "regex"))
    options = {"length": {"target": 4}, "regex": {"pattern": r"\d"}}.get(reward, {})
    case.mutation = f"{kind}: {what}"
    if rng.random() < 0.2 and kind != "template":
        case.argv = greedy_evaluation(str(base.model), source)
        return
    config = base.config(data=data, reward={"functions": [{"name": reward, "options": options}], "timeout_s": 5.0})
    (case.cwd / "c.yaml").write_text(yaml.safe_dump(config, allow_unicode=False))
    case.argv = ["train", "c.yaml"]


def _rows(changed: dict[int, dict[str, str]]) -> list[str]:
    """JSON of the rows, in which `changed` gives cells as JSON text."""
    lines = []
    for number, row in enumerate(ROWS):
        texts = {json.dumps(name): json.dumps(value) for name, value in row.items()}
        texts |= {json.dumps(name): text for name, text in changed.get(number, {}).items()}
        lines.append("{" + ", ".join(f"{name}: {text}" for name, text in texts.items()) + "}")
    return lines


def _write_rows(rng: random.Random, path: Path, lines: list[str]) -> str:
    """As .jsonl or .json. Returns the name."""
    if rng.random() < 0.5:
        (path / "rows.jsonl").write_text("\n".join(lines) + "\n")
        return "rows.jsonl"
    (path / "rows.json").write_text("[" + ",\n".join(lines) + "]")
    return "rows.json"


def _cell(rng: random.Random, path: Path) -> tuple[str, str]:
    column = rng.choice(("question", "question", "problem", "answer", "solution"))
    text = rng.choice(CELLS)
    which = range(len(ROWS)) if rng.random() < 0.6 else [3]
    changed = {number: {column: text, "problem" if column == "question" else column: text} for number in which}
    return f"{column} of {len(which)} rows is {shown(text)}", _write_rows(rng, path, _rows(changed))


def _name(rng: random.Random, path: Path) -> tuple[str, str]:
    name = rng.choice(NAMES)
    rows = rng.choice((1, len(ROWS)))
    return f"column {shown(name)}", _write_rows(rng, path, _rows({number: {name: '"x"'} for number in range(rows)}))


def _shape(rng: random.Random, path: Path) -> tuple[str, str]:
    what, text = json_value(rng)
    (path / "rows.json").write_text(text)
    (path / "rows.jsonl").write_text(f"{text}\n" * rng.choice((1, 3)))
    return f"nothing but {what} {shown(text)}", rng.choice(("rows.json", "rows.jsonl"))


def _text(rng: random.Random, path: Path) -> tuple[str, str]:
    name = _write_rows(rng, path, _rows({}))
    what, data = damage_json(rng, (path / name).read_text())
    (path / name).write_bytes(data)
    return f"{name} {what}", name


def _csv(rng: random.Random, path: Path) -> tuple[str, str]:
    cell = rng.choice((*TEXTS, "9" * 5_000, "x" * 200_000, '"', '"a', "a,b", "1e400", "inf", "\r", "07", "1_0"))
    lines = [
        "question,problem,answer,solution",
        *(f"{r['question']},{r['question']},{r['answer']},{r['answer']}" for r in ROWS),
    ]
    row = int(rng.random() * len(lines))
    what = f"line {row} ends in {shown(cell)}"
    lines[row] += cell
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    if rng.random() < 0.4:
        more, data = damage_bytes(rng, data)
        what = f"{what}; {more}"
    (path / "rows.csv").write_bytes(data)
    return what, "rows.csv"


def _parquet(rng: random.Random, path: Path) -> tuple[str, str]:
    import datetime
    import decimal

    import pyarrow as pa
    import pyarrow.parquet as pq

    odd = rng.choice(
        (
            "plain",
            "null",
            "bytes",
            "struct",
            "list",
            "decimal",
            "date",
            "duration",
            "dictionary",
            "binary",
            "twice",
            "nested",
            "empty",
        )
    )
    count = len(ROWS)
    values = {
        "null": pa.nulls(count),
        "bytes": pa.array([b"\xff\xfe"] * count),
        "struct": pa.array([{"ground_truth": "4"}] * count),
        "list": pa.array([CHAT] * count),
        "decimal": pa.array([decimal.Decimal("1.5")] * count),
        "date": pa.array([datetime.datetime(2024, 1, 1)] * count),
        "duration": pa.array([datetime.timedelta(1)] * count),
        "dictionary": pa.array(["a"] * count).dictionary_encode(),
        "binary": pa.array([b"abc"] * count),
        "nested": pa.array([[[[1]]]] * count),
        "plain": pa.array([row["answer"] for row in ROWS]),
    }
    questions = pa.array([row["question"] for row in ROWS])
    value = values.get(odd, values["plain"])
    columns = [questions, questions, value, value] if rng.random() < 0.6 else [value, value, questions, questions]
    names = ["question", "problem", "answer", "solution"]
    if odd == "twice":
        names[2] = "question"
    table = pa.table(columns, names=names)
    if odd == "empty":
        table = table.slice(0, 0)
    pq.write_table(table, path / "rows.parquet")
    what = f"of {odd}"
    if rng.random() < 0.5:
        more, data = damage_bytes(rng, (path / "rows.parquet").read_bytes())
        (path / "rows.parquet").write_bytes(data)
        what = f"{what}; {more}"
    return what, "rows.parquet"


def _directory(rng: random.Random, path: Path) -> tuple[str, str]:
    folder = path / "rows"
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(_rows({})))
    odd = rng.choice(
        (
            "two formats",
            "hidden",
            "link to itself",
            "link out",
            "FIFO",
            "device",
            "test only",
            "metadata",
            "empty file",
            "odd name",
            "other columns",
            "folder",
        )
    )
    other = folder / "train-2.jsonl"
    if odd == "two formats":
        (folder / "train.csv").write_text("question,answer\n1,2\n")
    elif odd == "hidden":
        (folder / "train.jsonl").rename(folder / ".train.jsonl")
    elif odd == "link to itself":
        (folder / "sub").symlink_to(".")
        other.symlink_to(other.name)
    elif odd == "link out":
        other.symlink_to("../../../../nowhere")
    elif odd == "FIFO":
        os.mkfifo(other)
    elif odd == "device":
        other.symlink_to("/dev/zero")
    elif odd == "test only":
        (folder / "train.jsonl").rename(folder / "test.jsonl")
    elif odd == "metadata":
        (folder / "train.jsonl").rename(folder / "state.json")
    elif odd == "empty file":
        other.touch()
    elif odd == "odd name":
        (folder / b"train-\xff\x1b[31m.jsonl".decode("utf-8", "surrogateescape")).write_text("{")
    elif odd == "other columns":
        other.write_text('{"x": 1}\n')
    else:
        other.mkdir()
    return odd, "rows"


def _entry(rng: random.Random, path: Path) -> tuple[str, str]:
    name = _write_rows(rng, path, _rows({}))
    return damage_entry(rng, path / name), f"./{name}"


def _plain(rng: random.Random, path: Path) -> tuple[str, str]:
    return "good rows", _write_rows(rng, path, _rows({}))


WRITERS: dict[str, Callable[[random.Random, Path], tuple[str, str]]] = {
    "cell": _cell,
    "name": _name,
    "shape": _shape,
    "text": _text,
    "csv": _csv,
    "parquet": _parquet,
    "directory": _directory,
    "entry": _entry,
    "template": _plain,
}
