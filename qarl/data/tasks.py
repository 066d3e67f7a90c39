"""Task generators: the built-in `task:arithmetic`, and every task of the `reasoning-gym` package."""

from __future__ import annotations

import random
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from qarl.config.data import TASKS
from qarl.data.values import Row, plain
from qarl.errors import UserError
from qarl.utils.text import visible

MOST_ROWS = 1_000_000  # limit for a generated source
_ANSWER_DIGITS = 4000  # Python's limit for printing integers is 4,300


def generate(source: str, options: dict[str, Any], max_rows: int | None = None) -> list[Row]:
    """Generate the rows of `task:NAME` or `reasoning-gym:NAME`, with `options` as keyword arguments. Deterministic.

    Raises UserError if an option is unknown or invalid, or if reasoning-gym is not installed or has no such task.
    """
    kind, _, name = source.partition(":")
    if kind == "reasoning-gym":
        return _reasoning_gym(name, options, max_rows)
    assert name in TASKS, f"the configuration accepts no task {name}"
    defaults: dict[str, Any] = arithmetic.__kwdefaults__ or {}
    unknown = sorted(set(options) - set(defaults))
    if unknown:
        valid = ", ".join(defaults)
        raise UserError(f"data.task.{unknown[0]}: unknown option of `task:arithmetic`; it takes {valid}")
    rows = options.get("size", defaults["size"])
    if max_rows is not None and type(rows) is int and max_rows < rows <= MOST_ROWS:
        options = {**options, "size": max_rows}  # the first rows are the same
    return arithmetic(**options)


def arithmetic(
    *,
    size: int = 1000,
    seed: int = 0,
    operations: Sequence[str] = ("+", "-"),
    digits: int | None = None,
    min: int | None = None,
    max: int | None = None,
    terms: int = 2,
) -> list[Row]:
    """Generate arithmetic problems as rows with `prompt` ("12 + 7") and `answer` ("19"), both text.

    Row i depends only on the seed and on i, so a larger `size` extends a smaller one. Answers may be negative.

    Args:
        size: Number of rows.
        seed: Random seed.
        operations: Any of + - *, chosen independently between operands; * binds tighter.
        digits: Exact number of digits of operands, instead of `min` and `max`.
        min, max: Range of operands, inclusive; default [0, 99].
        terms: Number of operands.

    Raises:
        UserError: An option is invalid. The message names it.
    """
    for name, value, least, most in (
        ("size", size, 1, MOST_ROWS),
        ("terms", terms, 2, 1000),
        ("digits", digits, 1, 100),
        ("min", min, 0, 10**100),
        ("max", max, 0, 10**100),
        ("seed", seed, -(2**63), 2**63 - 1),
    ):
        if value is None and name in ("digits", "min", "max"):
            continue
        if type(value) is not int or value < least:
            shown = visible(f"{value!r:.60}")
            raise UserError(f"data.task.{name}: must be an integer of at least {least}, got {shown}")
        if value > most:
            raise UserError(f"data.task.{name}: must be at most {most:,}")
    if not isinstance(operations, (list, tuple)) or not operations or any(o not in ("+", "-", "*") for o in operations):
        raise UserError(f"data.task.operations: must be a list of '+', '-' or '*', got {operations!r}")
    if digits is not None:
        if min is not None or max is not None:
            raise UserError("data.task.digits: cannot be given together with min or max")
        low, high = (0 if digits == 1 else 10 ** (digits - 1)), 10**digits - 1
    else:
        low, high = (0 if min is None else min), (99 if max is None else max)
        if high < low:
            raise UserError(f"data.task.max: must be an integer of at least min = {low}, got {high!r}")
    if terms * len(str(high)) > _ANSWER_DIGITS:
        raise UserError(
            f"data.task.terms: the product of {terms} operands of {len(str(high))} digits can have more than "
            f"{_ANSWER_DIGITS:,} digits; lower one of the two"
        )
    return [_problem(random.Random(f"{seed}-{index}"), list(operations), low, high, terms) for index in range(size)]


def _problem(rng: random.Random, operations: list[str], low: int, high: int, terms: int) -> Row:
    text = str(first := rng.randint(low, high))
    products = [first]  # signed products, whose sum is the answer
    for _ in range(terms - 1):
        operation, operand = rng.choice(operations), rng.randint(low, high)
        text += f" {operation} {operand}"
        if operation == "*":
            products[-1] *= operand
        else:
            products.append(operand if operation == "+" else -operand)
    return {"prompt": text, "answer": str(sum(products))}


def _reasoning_gym(name: str, options: dict[str, Any], max_rows: int | None) -> list[Row]:
    """Return rows with `prompt`, `answer` (None for tasks without a single correct answer) and `entry`.

    `entry` is the package's entry, for the reward `reasoning_gym`. Its metadata gets a key `source_options`, because
    the scores of some tasks depend on their configuration.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(
            f"data.source: `reasoning-gym:{name}` needs the package reasoning-gym; pip install 'qarl[tasks]'"
        ) from error
    if name not in DATASETS:
        close = get_close_matches(name, DATASETS, n=5, cutoff=0.5)
        near = f"close names: {', '.join(close)}" if close else f"there are {len(DATASETS)}, such as chain_sum"
        raise UserError(f"data.source: reasoning-gym has no task `{name}`; {near}")
    source_options = {key: value for key, value in options.items() if key not in ("size", "seed")}
    rows = []
    try:
        dataset = reasoning_gym.create_dataset(name, **{"seed": 0, "size": 1000, **options})
        count = len(dataset) if max_rows is None else min(max_rows, len(dataset))
        if count > MOST_ROWS:
            raise UserError(f"data.task.size: must be at most {MOST_ROWS:,}, got {count:,}; or set data.max_rows")
        for index in range(count):
            entry = dataset[index]
            entry["metadata"]["source_options"] = source_options
            rows.append(plain({"prompt": entry["question"], "answer": entry["answer"], "entry": entry}))
    except UserError:
        raise
    except Exception as error:  # about a hundred generators, which raise different errors for invalid options
        said = visible(" ".join(str(error).split())[:300]) or type(error).__name__
        raise UserError(f"data.task: reasoning-gym:{name} refuses {visible(f'{options!r:.200}')}: {said}") from error
    return rows
