"""A run is resumed only if its metrics and checkpoints agree about its steps: generated cuts of either."""

import itertools
import json
import random
from pathlib import Path

import pytest

from qarl.errors import UserError
from qarl.storage.history import History, began_after, read_history, write_history

EVERY = 5


def record(run: Path, steps: list[int], history: History | None = None) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "x": 0.5}) + "\n" for step in steps))
    if history is not None:
        write_history(run, history)
    return run


@pytest.mark.parametrize("start, done", [(5, 5), (5, 7), (10, 14)])
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("old", [False, True])
def test_a_complete_record_is_continued_whatever_follows_the_checkpoint(tmp_path, start, done, after, old):
    history = None if old else History(began_after=after, checkpoint=start)
    run = record(tmp_path, list(range(after + 1, done + 1)), history)
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 99, "x')
    assert began_after(run, start, own=True, every=EVERY) == after


def test_lines_missing_before_the_checkpoint_are_refused_and_named(tmp_path):
    """Subsets of a short record's lines, and shuffled and repeated lines."""
    whole, start = list(range(1, 8)), 6
    for count in range(1, 3):
        for lost in itertools.combinations(whole, count):
            left = [step for step in whole if step not in lost]
            run = record(tmp_path, left, History(checkpoint=start))
            if min(lost) > start:  # steps after the checkpoint are repeated anyway
                assert began_after(run, start, own=True, every=EVERY) == 0
                continue
            line = rf"metrics\.jsonl: lacks steps? {min(lost)}\b.*restore the file"
            with pytest.raises(UserError, match=line) as caught:
                began_after(run, start, own=True, every=EVERY)
            assert "\n" not in str(caught.value)
    rng = random.Random(1)
    for _ in range(50):
        mixed = whole[:start] + rng.choices(whole[:start], k=rng.randint(0, 2))
        rng.shuffle(mixed)
        if mixed[:start] != whole[:start]:
            with pytest.raises(UserError, match=r"does not hold each step once and in order|more than once"):
                began_after(record(tmp_path, mixed, History(checkpoint=start)), start, own=True, every=EVERY)


def test_a_repeated_line_after_that_of_the_checkpoint_is_refused(tmp_path):
    run = record(tmp_path, [1, 2, 3, 2, 4], History(checkpoint=3))
    with pytest.raises(UserError, match=r"metrics\.jsonl: holds step 2 more than once, and .* restore the file"):
        began_after(run, 3, own=True, every=EVERY)


GONE = "checkpoints: the checkpoints of this run are gone"


@pytest.mark.parametrize("done", [0, 1, 5, 6])
@pytest.mark.parametrize("history", [None, History(), History(checkpoint=5), History(began_after=3, checkpoint=5)])
def test_without_checkpoints_only_a_run_that_never_had_one_starts_over(tmp_path, done, history):
    run = record(tmp_path, list(range(1, done + 1)), history)
    if done == 0 or (history is None and done <= EVERY) or history == History():  # no checkpointed step is lost
        assert began_after(run, 0, own=False, every=EVERY) == 0
    else:
        with pytest.raises(UserError, match=GONE + r" \(there was one of step 5"):
            began_after(run, 0, own=False, every=EVERY)


def test_rollouts_alone_count_as_a_record(tmp_path):
    run = record(tmp_path, [], History(checkpoint=5))
    (run / "rollouts").mkdir()
    (run / "rollouts" / "000005.jsonl").touch()
    with pytest.raises(UserError, match=GONE):
        began_after(run, 0, own=False, every=EVERY)


def test_a_run_that_began_from_another_ones_checkpoint(tmp_path):
    run = record(tmp_path, [4, 5], History(began_after=3))
    assert began_after(run, 3, own=False, every=EVERY) == 3  # the same command again
    with pytest.raises(UserError, match="began from a checkpoint of another one, of step 3"):
        began_after(run, 0, own=False, every=EVERY)
    other = r"checkpoint\.resume: is a checkpoint of another run, and .* holds steps of its own"
    with pytest.raises(UserError, match=other):
        began_after(run, 2, own=False, every=EVERY)
    assert began_after(record(tmp_path / "new", []), 3, own=False, every=EVERY) == 3


@pytest.mark.parametrize("text", ["", "[]", '{"checkpoint": -1}', '{"began_after": "3"}'])
def test_a_damaged_history_is_one_line(tmp_path, text):
    run = record(tmp_path, [1])
    (run / "history.json").write_text(text)
    with pytest.raises(UserError, match=r"history\.json: .*; restore it, remove it if nothing else is gone") as caught:
        read_history(run)
    assert "\n" not in str(caught.value)
