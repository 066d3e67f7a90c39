"""Rows with hostile cells, in files of every format that data may have, damaged or not."""

import json
import shlex
from pathlib import Path
from typing import Any

import yaml
from fuzzing.base import EVALUATE_GREEDILY, FILE_DATA, ROWS, config, lay_out
from fuzzing.case import Case
from fuzzing.damage import damage_entry, damage_file
from fuzzing.values import ESCAPE, chance, json_values, listed, make_traps, pick, shown, texts
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, sampled_from

ANSWERS = listed(r"#### 4  \boxed{4}  \boxed{{{{  \frac{1}{0}  2^{2^{2^{2^{99}}}}  9**9**9**9  " + "(" * 5_000)
contents = sampled_from(("2 + 2 =", [{"type": "image"}], [{"type": "text", "text": "x"}], 5, None, "\ud800"))
messages = st.fixed_dictionaries({"content": contents}, optional={"role": sampled_from(("user", "tool", None, ESCAPE))})
# JSON of a value in the cell of a row: what appears in datasets, and what only an enemy writes.
cells = st.one_of(
    json_values,
    json_values,
    st.lists(messages, min_size=1, max_size=3).map(json.dumps),
    sampled_from((*ANSWERS, "x" * 200_000, {"ground_truth": "4"})).map(json.dumps),
)
columns = sampled_from(("question", "question", "answer", "solution")) | texts | sampled_from(("prompts", "self"))


def mutate_dataset(draw: DrawFn, base: Path, case: Case) -> None:
    """One step of training on rows with a hostile cell or in a damaged file, or an evaluation."""
    make_traps(case.cwd)
    lay_out(base, case, "model")
    column, cell = draw(columns), draw(cells)
    source = f"rows.{pick(draw, ('jsonl', 'jsonl', 'json', 'csv'))}"
    path = case.cwd / source
    changed = range(len(ROWS)) if chance(draw, 60) else [3]
    what = f"{source}: {shown(column)} of {len(changed)} rows is {shown(cell)}"
    _write_rows(path, column, cell, changed)
    if chance(draw, 40):
        what = f"{what}; {(damage_file if chance(draw, 80) else damage_entry)(draw, path)}"
    data: dict[str, Any] = FILE_DATA | {"source": source}
    if chance(draw, 40):
        data |= pick(draw, ({"chat_template": False}, {"split": draw(texts)}, {"prompt_template": draw(texts)}))
    rewards = ({"name": "length", "options": {"target": 4}}, {"name": "math"}, {"name": "exact"})
    settings = config(data=data, reward={"functions": [pick(draw, rewards)], "timeout_s": 5.0})
    (case.cwd / "c.yaml").write_text(yaml.safe_dump(settings, allow_unicode=False))
    evaluation = shlex.split(EVALUATE_GREEDILY.format(source))
    case.mutation, case.argv = what, evaluation if chance(draw, 20) else ["train", "c.yaml"]


def _write_rows(path: Path, column: str, cell: str, changed: range | list[int]) -> None:
    """Write the rows in the format of the path. cell: JSON text of the column's value in the changed rows."""
    lines = []
    for number, row in enumerate(ROWS):
        members = {json.dumps(name): json.dumps(value) for name, value in row.items()}
        members |= {json.dumps(column): cell} if number in changed else {}
        lines.append("{" + ", ".join(f"{name}: {text}" for name, text in members.items()) + "}")
    table = [f"{row['question']},{row['answer']},{cell if n in changed else '1'}" for n, row in enumerate(ROWS)]
    texts = {
        ".jsonl": "".join(f"{line}\n" for line in lines),
        ".json": f"[{', '.join(lines)}]",
        ".csv": "\n".join([f"question,answer,{column}", *table]),
    }
    path.write_bytes(texts[path.suffix].encode("utf-8", "surrogatepass"))
