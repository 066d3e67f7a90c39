"""Reward functions that return None for rows, which skips those rows."""

import random

import pytest

from qarl.config.reward import RewardConfig
from qarl.rewards import RewardPool
from qarl.training.metrics import reward_metrics

# Completion "1 - 3" scores 1 with the first function, None with the second, and 3 with the third.
FUNCTIONS = """
def pick(completions, place):
    return [None if word == "-" else float(word) for word in (c.split()[place] for c in completions)]
def first(completions, **columns): return pick(completions, 0)
def second(completions, **columns): return pick(completions, 1)
def third(completions, **columns): return pick(completions, 2)
"""
NAMES, WEIGHTS = ("first", "second", "third"), (1.0, -0.5, 2.0)


@pytest.fixture(scope="module", params=[1, 3])
def picking(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("picking") / "picking.py"
    path.write_text(FUNCTIONS)
    functions = [{"name": f"{path}:{name}", "weight": w} for name, w in zip(NAMES, WEIGHTS, strict=True)]
    with RewardPool(RewardConfig(functions=functions, workers=request.param), []) as rewards:
        yield rewards


@pytest.mark.parametrize("seed", range(3))
def test_the_other_functions_of_a_skipped_row_count(picking, seed):
    rng = random.Random(seed)
    rows = [[rng.choice(["-", "-", "0", "1", "-3", "2.5"]) for _ in NAMES] for _ in range(rng.randrange(1, 20))]
    result = picking.score([" ".join(row) for row in rows], ["p"] * len(rows), {})
    right = [
        [sum(w * float(word) for w, word in zip(WEIGHTS, row, strict=True) if word != "-") for row in rows],
        {name: [None if row[i] == "-" else float(row[i]) for row in rows] for i, name in enumerate(NAMES)},
        {name: sum(row[i] == "-" for row in rows) for i, name in enumerate(NAMES)},
    ]
    assert [result.total, result.by_function, result.skipped] == right
    unscored = [i for i, row in enumerate(rows) if set(row) == {"-"}]
    text = "every reward function returned None for {} completions, which score 0; the first is completion {}"
    assert result.messages == ([text.format(len(unscored), unscored[0])] if unscored else [])
    assert not any(result.failed.values())


def test_metrics_leave_out_skipped_rows(picking):
    metrics = reward_metrics(picking.score(["1 - -", "3 4 -", "- - -"], ["p"] * 3, {}))
    assert metrics == pytest.approx(
        {
            "reward/mean": 2 / 3,
            "reward/std": (2 / 9) ** 0.5,
            "reward/first_mean": 2.0,
            "reward/second_mean": 4.0,
            "reward/first_skipped": 1.0,
            "reward/second_skipped": 2.0,
            "reward/third_skipped": 3.0,
            "reward/failed": 0.0,
        }
    )
