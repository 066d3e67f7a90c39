import json

import pytest

from qarl.data.tasks import arithmetic, generate
from qarl.errors import UserError


def test_arithmetic_answers_are_right():
    for row in arithmetic(size=300, operations=["+", "-", "*"], terms=4, max=30):
        assert row["answer"] == str(eval(row["prompt"]))  # Python's precedence is the arithmetic's
        assert sum(row["prompt"].count(f" {sign} ") for sign in "+-*") == 3


def test_arithmetic_stays_what_it_was():
    # Written down once: a change would change every run that uses the task.
    rows = arithmetic(size=3, seed=0)
    assert [row["prompt"] for row in rows] == ["40 + 37", "25 - 30", "84 - 53"]
    assert rows == generate("task:arithmetic", {"size": 1_000_000}, 3) != arithmetic(size=3, seed=4)


@pytest.mark.parametrize(("digits", "low", "high"), [(1, 0, 9), (2, 10, 99), (3, 100, 999)])
def test_arithmetic_digits_bound_the_operands(digits, low, high):
    rows = arithmetic(size=200, digits=digits, operations=["+"])
    operands = [int(operand) for row in rows for operand in row["prompt"].split(" + ")]
    assert low <= min(operands) and max(operands) <= high


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, r"data.task.size: must be an integer of at least 1, got 0"),
        ({"operations": ["/"]}, r"data.task.operations.*\['/'\]"),
        ({"min": 5, "max": 4}, r"data.task.max: must be an integer of at least min = 5, got 4"),
        ({"digits": 2, "max": 4}, r"data.task.digits: cannot be given together"),
        ({"sise": 3}, r"data.task.sise: unknown option .*it takes size, seed, operations"),
    ],
)
def test_arithmetic_refuses_an_impossible_option(options, message):
    with pytest.raises(UserError, match=message):
        generate("task:arithmetic", options)


def test_reasoning_gym_rows_carry_the_entry_and_repeat_without_a_seed():
    pytest.importorskip("reasoning_gym")
    rows = generate("reasoning-gym:chain_sum", {"size": 10**9, "seed": 1, "max_terms": 3}, max_rows=4)
    assert len(rows) == 4
    assert generate("reasoning-gym:chain_sum", {"size": 3}) == generate("reasoning-gym:chain_sum", {"size": 3})
    for row in rows:
        assert row["prompt"] == row["entry"]["question"]
        assert row["answer"] == row["entry"]["answer"]
        assert row["entry"]["metadata"]["source_dataset"] == "chain_sum"
        assert row["entry"]["metadata"]["source_options"] == {"max_terms": 3}
        assert json.dumps(row)


@pytest.mark.parametrize("options", [{"nonsense": 1}, {"min_terms": 5, "max_terms": 2}])
def test_reasoning_gym_refused_options_become_one_line(options):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(UserError, match=r"data.task: reasoning-gym:chain_sum refuses") as caught:
        generate("reasoning-gym:chain_sum", options)
    assert "\n" not in str(caught.value)
