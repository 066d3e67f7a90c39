"""Datasets: json, jsonl, csv, parquet and directories of them, damaged or of shapes that nobody expects."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, sampled_from

from fuzzing.base import EVALUATE_GREEDILY, ROWS, Base
from fuzzing.case import Case
from fuzzing.damage import damage_bytes, damage_entry, damage_file
from fuzzing.values import ESCAPE, chance, file_names, json_values, listed, make_traps, pick, position, shown, texts

TEMPLATES = listed("""
    {question} =  {question:>99999999999}  {question!r}  {answer:{answer}}  {question.__class__}  {question[0]}
    {nosuch}  {question:1000000000}  {answer:d}  {answer:,.99999999f}  \ud800{question}  {question:\0>9}
""")
ANSWERS = listed(r"#### 4  \boxed{4}  \boxed{{{{  \frac{1}{0}  2^{2^{2^{2^{99}}}}  9**9**9**9  " + "(" * 5_000)
roles = sampled_from(("user", "user", "assistant", "system", "tool", None, ["user"], ESCAPE))
parts = sampled_from(([{"type": "text", "text": "2 + 2 ="}], [{"type": "image"}], {"a": 1}, 5, None, "\ud800"))
messages = st.fixed_dictionaries(
    {},
    optional={
        "role": roles,
        "content": st.just("2 + 2 =") | parts,
        "tool_calls": st.just([{"function": None}]),
    },
)
# JSON of a value in the cell of a row: what appears in datasets, and what only an enemy writes.
cells = st.one_of(
    json_values,
    json_values,
    st.lists(messages | st.none(), min_size=1, max_size=3).map(json.dumps),
    messages.map(json.dumps),
    sampled_from(ANSWERS).map(json.dumps),
    sampled_from(("x" * 200_000, "9" * 5_000, "é\n" * 1_000, {"ground_truth": "4"})).map(json.dumps),
)
columns = texts | file_names | sampled_from(listed("prompt  answer  completions  prompts  self  completion_ids  class"))


def mutate_dataset(draw: DrawFn, base: Base, case: Case) -> None:
    """One step of training on it, or an evaluation."""
    make_traps(case.cwd)
    kind = pick(draw, [*WRITERS, "cell", "cell", "text", "directory"])
    what, source = WRITERS[kind](draw, case.cwd)
    data: dict[str, Any] = {"columns": {"prompt": "question"}, "task": {}, "source": source}
    if kind == "good rows" or chance(draw, 15):
        data["prompt_template"] = pick(draw, [*TEMPLATES, "{question}" * 200])
        what = f"{what}; template {shown(data['prompt_template'])}"
    if chance(draw, 30):
        data["chat_template"] = False
    if chance(draw, 10):
        data["split"] = draw(sampled_from(("test", "train", "nosuch", "..")) | texts)
    reward = pick(draw, ("length", "math", "exact", "regex"))
    options = {"length": {"target": 4}, "regex": {"pattern": r"\d"}}.get(reward, {})
    case.mutation = f"{kind}: {what}"
    if chance(draw, 20) and kind != "good rows":
        case.argv = shlex.split(EVALUATE_GREEDILY.format(base.model, source))
        return
    config = base.config(data=data, reward={"functions": [{"name": reward, "options": options}], "timeout_s": 5.0})
    (case.cwd / "c.yaml").write_text(yaml.safe_dump(config, allow_unicode=False))
    case.argv = ["train", "c.yaml"]


def _write_rows(draw: DrawFn, folder: Path, changed: dict[int, dict[str, str]]) -> str:
    """As .jsonl or .json, with cells of `changed` given as JSON text. Returns the file's name."""
    lines = []
    for number, row in enumerate(ROWS):
        members = {json.dumps(name): json.dumps(value) for name, value in row.items()}
        members |= {json.dumps(name): text for name, text in changed.get(number, {}).items()}
        lines.append("{" + ", ".join(f"{name}: {text}" for name, text in members.items()) + "}")
    if draw(st.booleans()):
        (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
        return "rows.jsonl"
    (folder / "rows.json").write_text("[" + ",\n".join(lines) + "]")
    return "rows.json"


def _cell(draw: DrawFn, folder: Path) -> tuple[str, str]:
    column, text = pick(draw, ("question", "question", "problem", "answer", "solution")), draw(cells)
    which = range(len(ROWS)) if chance(draw, 60) else [3]
    changed = {number: {column: text, "problem" if column == "question" else column: text} for number in which}
    return f"{column} of {len(which)} rows is {shown(text)}", _write_rows(draw, folder, changed)


def _column(draw: DrawFn, folder: Path) -> tuple[str, str]:
    name = draw(columns)
    rows = range(pick(draw, (1, len(ROWS))))
    return shown(name), _write_rows(draw, folder, {number: {name: '"x"'} for number in rows})


def _text(draw: DrawFn, folder: Path) -> tuple[str, str]:
    name = _write_rows(draw, folder, {})
    return damage_file(draw, folder / name), name


def _csv(draw: DrawFn, folder: Path) -> tuple[str, str]:
    special = ("9" * 5_000, "x" * 200_000, '"', '"a', "a,b", "1e400", "inf", "\r", "07", "1_0")
    cell = draw(texts | sampled_from(special))
    lines = ["question,problem,answer,solution", *(f"{r['question']},{r['question']},{r['answer']},x" for r in ROWS)]
    row = position(draw, len(lines))
    lines[row] += cell
    what, data = f"line {row} ends in {shown(cell)}", "\n".join(lines).encode("utf-8", "surrogatepass")
    if chance(draw, 40):
        more, data = damage_bytes(draw, data)
        what = f"{what}; {more}"
    (folder / "rows.csv").write_bytes(data)
    return what, "rows.csv"


def _parquet(draw: DrawFn, folder: Path) -> tuple[str, str]:
    import datetime
    import decimal

    import pyarrow as pa
    import pyarrow.parquet as pq

    chat = [{"role": "user", "content": "2 + 2 ="}]
    cell = pick(
        draw,
        ("4", None, b"\xff\xfe", {"ground_truth": "4"}, chat, [[[1]]], decimal.Decimal("1.5"), datetime.timedelta(1)),
    )
    value = pa.array([cell] * len(ROWS))
    if cell == "4" and draw(st.booleans()):
        value = value.dictionary_encode()
    questions = pa.array([row["question"] for row in ROWS])
    arrays = [questions, questions, value, value] if chance(draw, 60) else [value, value, questions, questions]
    names = ["question", "problem", pick(draw, ("answer", "answer", "answer", "question")), "solution"]
    table = pa.table(arrays, names=names).slice(0, 0 if chance(draw, 8) else None)
    pq.write_table(table, folder / "rows.parquet")
    what = f"{table.num_rows} rows of {cell!r} in {names}"
    if draw(st.booleans()):
        more, data = damage_bytes(draw, (folder / "rows.parquet").read_bytes())
        (folder / "rows.parquet").write_bytes(data)
        what = f"{what}; {more}"
    return what, "rows.parquet"


def _directory(draw: DrawFn, folder: Path) -> tuple[str, str]:
    """A directory of one good file, of which the name is no data's, or another entry."""
    (folder / "rows").mkdir()
    good = folder / "rows" / _write_rows(draw, folder / "rows", {})
    name = draw(sampled_from(("train.csv", ".train.jsonl", "test.jsonl", "state.json", "sub")) | file_names)
    other = good.parent / (name.replace("/", "").replace("\0", "").strip(".")[:200] or "x")
    kind = pick(draw, ("file", "renamed", "with another"))
    if kind == "file":
        return damage_entry(draw, good), f"./rows/{good.name}"
    if kind == "renamed":
        good.rename(other)
    elif not other.exists():
        other.write_text(pick(draw, ("question,answer\n1,2\n", '{"x": 1}\n', "{")))
        kind = damage_entry(draw, other) if chance(draw, 70) else "with another"
    return f"{kind} {shown(name)}", "rows"


def _good_rows(draw: DrawFn, folder: Path) -> tuple[str, str]:
    return "", _write_rows(draw, folder, {})


WRITERS: dict[str, Callable[[DrawFn, Path], tuple[str, str]]] = {
    "cell": _cell,
    "column": _column,
    "text": _text,
    "csv": _csv,
    "parquet": _parquet,
    "directory": _directory,
    "good rows": _good_rows,
}
