"""`tools/make_traces.py`: solutions that are right, of the wanted length, and files that share no prompt."""

import json
import random
import re
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import make_traces as traces
import pytest

COUNTS = ["--sft", "60", "--held-out", "5", "--rl", "20", "--test", "20", "--ladder", "30"]


def words(text: str) -> int:
    """Stands in for a tokenizer: characters of a digit or sign, and words."""
    return len(re.findall(r"\d|[a-zA-Z]+|[^\w\s]", text))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("traces")
    traces.make(traces.parse(["--out", str(out), "--lengths", "100", "900", *COUNTS]), words)
    return out


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files_have_their_rows_no_prompt_twice_and_repeat_with_the_arguments(made, tmp_path):
    counts = {"sft": 60, "held_out": 5, "rl": 20, "test": 20, "ladder": 30}
    files = {name: rows(made / f"{name}.jsonl") for name in counts}
    assert {name: len(found) for name, found in files.items()} == counts
    prompts = [
        row["messages"][0]["content"] if "messages" in row else row["prompt"] for f in files.values() for row in f
    ]
    assert len(set(prompts)) == len(prompts) == sum(counts.values())
    assert {row["level"] for row in files["sft"] + files["rl"]} == {1, 2, 4, 5}
    assert {row["level"] for row in files["test"]} == {3, 6}
    assert {(row["family"], row["level"]) for row in files["ladder"]} == set(product(traces.FAMILIES, traces.LEVELS))
    lengths = [words(row["messages"][1]["content"]) for row in files["sft"]]
    assert min(lengths) >= 100 and max(lengths) <= 900
    traces.make(traces.parse(["--out", str(tmp_path), "--lengths", "100", "900", *COUNTS]), words)
    for path in made.glob("*.jsonl"):
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


@pytest.mark.parametrize("family", traces.FAMILIES)
@pytest.mark.parametrize("level", traces.LEVELS)
def test_answers_are_right(family, level):
    """Against another way to the answer: arithmetic of the prompt's numbers, running the program, trying the clues."""
    draw, found = random.Random(0), []
    while len(found) < 20:
        if (task := traces.FAMILIES[family](draw, *traces.SIZES[family][level - 1])) is not None:
            found.append(task)
    for task in found:
        numbers = [int(number) for number in re.findall(r"-?\d+", task.prompt)]
        if family == "addition":
            assert int(task.answer) == sum(numbers)
        elif family == "multiplication":
            assert int(task.answer) == numbers[0] * numbers[1]
        elif family == "signs":
            assert re.fullmatch(r"\d+([+-]\d+)+", task.answer) and eval(task.answer) == numbers[-1]
            assert re.findall(r"\d+", task.answer) == [str(number) for number in numbers[:-1]]
            assert task.work[-1].endswith("yes") and not any(line.endswith("yes") for line in task.work[:-1])
        elif family == "program":
            printed = list[Any]()
            exec(task.prompt.partition("\n")[2], {"print": printed.append})
            assert task.answer == str(printed[0]) and len(printed) == 1
        else:
            line, clues = task.answer.split(), re.findall(r"(\w+) is before (\w+)", task.prompt)
            assert all(line.index(a) < line.index(b) for a, b in clues)
            assert set(pairwise(line)) <= set(clues)  # so no other line fits


def test_steps_of_the_columns_are_right():
    for lines, value in (traces.add_columns([987, 65, 4321]), traces.times_digit(9876, 7)):
        assert value in (987 + 65 + 4321, 9876 * 7)
        equations = re.findall(r"(\d+)([+*])(\d+)=(\d+)", " ".join(lines))
        assert len(equations) == (12 if value == 987 + 65 + 4321 else 8)
        assert all(int(c) == (int(a) + int(b) if sign == "+" else int(a) * int(b)) for a, sign, b, c in equations)


def test_what_cannot_be_made_is_one_line(tmp_path):
    short = traces.parse(["--out", str(tmp_path / "none"), "--lengths", "1", "3", "--test", "1"])
    with pytest.raises(SystemExit, match="addition, level 3: 2000 drafts gave no new solution of 1 to 3 tokens"):
        traces.make(short, words)
    assert not (tmp_path / "none").exists()
