"""The pool: order and sums of scores, what a failure costs, and what is printed."""

import re

import pytest
from ordered import score

from qarl.config.reward import RewardConfig
from qarl.errors import UserError
from qarl.rewards import RewardPool


@pytest.mark.parametrize("workers", [1, 3])
def test_scores_keep_the_order_of_the_batch(pool, workers):
    completions = [str(i) for i in range(10)]
    result = score(pool(workers=workers), *completions)
    assert result.total == [float(i) for i in range(10)]
    assert (result.failed, result.messages) == ({"orders": 0}, [])


def test_total_is_the_weighted_sum(file):
    functions = [
        {"name": "exact", "weight": 2.0},
        {"name": f"{file}:answers", "weight": -0.5},
        {"name": "length", "weight": 0.25, "options": {"unit": "words"}},
    ]
    with RewardPool(RewardConfig(functions=functions), columns=["answer"]) as rewards:
        result = rewards.score(["a", "b c"], ["p", "p"], {"answer": ["a", "a"]})
    assert result.by_function == {"exact": [1.0, 0.0], "answers": [1.0, 0.0], "length": [-1.0, -2.0]}
    assert result.total == [2.0 - 0.5 - 0.25, -0.5]


def test_workers_run_at_the_same_time(pool):
    assert len(set(score(pool("pids", workers=2), "1", "2").total)) == 2


def test_lists_of_unequal_length_are_refused_and_empty_ones_have_no_scores(pool):
    rewards = pool()
    with pytest.raises(ValueError, match="answer has 1 values for 2 completions"):
        rewards.score(["1", "2"], ["p", "p"], {"answer": ["a"]})
    assert rewards.score([], [], {}).total == []


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("raise", r"ValueError: I was told to \(functions.py:8\)"),
        ("die", r"its worker process exited with code 3"),
        ("return [1.0] * (len(c) + 1)", r"returned 2 scores for 1 completions"),
        ("return ['1'] * len(c)", r"returned '1' \(str\), expected a number or None"),
        ("return [float('nan')] * len(c)", r"returned nan, expected a finite number"),
    ],
)
def test_only_the_guilty_completion_scores_zero(pool, caplog, order, message):
    rewards = pool()
    result = score(rewards, "1", order, "3")
    assert result.total == [1.0, 0.0, 3.0]
    assert result.failed == {"orders": 1}
    assert len(result.messages) == 2  # the batch, then the completion
    assert [record.levelname for record in caplog.records if record.name == "qarl.rewards"] == ["WARNING"] * 2
    assert re.search(message, result.messages[1])
    assert result.messages[1].startswith("reward `orders`: completion 1 scores 0: ")
    assert score(rewards, "7").total == [7.0]


def test_function_that_fails_only_on_batches_counts_no_failure(pool):
    result = score(pool("whole_batches_only"), "1", "2")
    assert (result.total, result.failed) == ([1.0, 2.0], {"whole_batches_only": 0})
    assert "too many at once" in result.messages[0]


def test_failures_past_the_fraction_stop_the_run(pool):
    rewards = pool(max_failed_frac=0.5)
    assert score(rewards, "raise", "1", "raise", "2").failed == {"orders": 2}
    message = (
        r"reward `orders`: failed on 3 of 4 completions, more than reward.max_failed_frac 0.5; last failure: SystemExit"
    )
    with pytest.raises(UserError, match=message):
        score(rewards, "raise", "1", "raise", "exit")
    assert score(rewards, "7").total == [7.0]


def test_prints_go_to_the_log_and_not_into_the_protocol(pool, tmp_path, capfd):
    rewards = pool(log_path=tmp_path / "rewards.log")
    assert score(rewards, "print", "1").total == [4.0, 1.0]
    assert (tmp_path / "rewards.log").read_bytes() == b"printed by the reward\n\x00\x01 written to fd 1\n"
    assert capfd.readouterr() == ("", "")
