"""What a batch asks, in which order and for how long, with a clock of its own and no process."""

import random

import pytest

from qarl.config import RewardConfig
from qarl.rewards.batch import Batch
from qarl.rewards.process import Report

TIMEOUT_S = 10.0
LOAD_S = 2.0


def simulate(behaviour: list[str | float], chunks: int = 1, workers: int = 1):
    """Scores completions of which number i takes `behaviour[i]` seconds, or is "hang", "raise" or "die".

    Returns the result and the seconds that it took.
    """
    n = len(behaviour)
    config = RewardConfig(functions=[{"name": "exact"}], workers=chunks, timeout_s=TIMEOUT_S, max_failed_frac=1.0)
    batch = Batch([str(i) for i in range(n)], ["p"] * n, {}, None, config, ["f"], [False])
    now = 0.0
    busy: list[tuple[float, Report]] = []
    while batch.left or busy:
        while len(busy) < workers and (asked := batch.next_task(now)) is not None:
            task, limit_s = asked
            took, outcome, hung = 0.0, [float(i) for i in task.indices], False
            for what in (behaviour[i] for i in task.indices):
                took += what if isinstance(what, float) else 0.0
                if what == "hang" or took > limit_s:
                    took, outcome, hung = limit_s + LOAD_S, "no answer", True
                elif what == "die":
                    took, outcome = took + LOAD_S, "died"
                elif what == "raise":
                    outcome = "raised"
                if isinstance(outcome, str):
                    break
            busy.append((now + took, Report(task, outcome, hung)))
        if busy:
            now, report = busy.pop(busy.index(min(busy, key=lambda item: item[0])))
            batch.take(report, now, LOAD_S)
    return batch.result(), now


@pytest.mark.parametrize("chunks", [1, 4])
def test_any_batch_takes_a_bounded_time_and_loses_no_completion(chunks):
    rng = random.Random(chunks)
    for _ in range(30):
        n = rng.randrange(1, 600)
        shares = [rng.random() ** 4 for _ in range(3)]
        behaviour = [
            rng.choices(["hang", "raise", "die", rng.choice([0.0, 0.01, 1.0])], [*shares, 1.0])[0] for _ in range(n)
        ]
        result, took = simulate(behaviour, chunks, workers=chunks)
        # the chunks, the retries, and the last of them with the loading after it
        assert took <= (TIMEOUT_S + LOAD_S) + (6 * TIMEOUT_S + 3 * LOAD_S) + (TIMEOUT_S + LOAD_S)
        good = sum(score == float(i) for i, score in enumerate(result.total))
        assert good + result.failed["f"] >= n  # number 0 may have failed with the score that it deserves
        assert all(score in (0.0, float(i)) for i, score in enumerate(result.total))
        assert all(result.total[i] == 0.0 for i, what in enumerate(behaviour) if isinstance(what, str))


def test_what_is_left_when_the_time_is_used_up_is_one_message():
    result, took = simulate(["hang"] * 1000)
    assert (result.failed, took < 100.0, len(result.messages) < 40) == ({"f": 1000}, True, True)
    assert "completions of failed calls score 0: the time for retries is used up" in result.messages[-1]
