"""Evaluating in process: batches and interruptions change nothing, and what is kept is whole."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from qarl.config import EvalTask, EvaluationConfig
from qarl.errors import UserError
from qarl.evaluation import runner
from qarl.evaluation.directory import ResultsDirectory
from qarl.evaluation.results import metrics_of
from qarl.evaluation.runner import Settings, evaluate
from qarl.evaluation.tasks import TaskRewards, load_tasks
from qarl.inference.opening import open_policy
from qarl.inference.target import resolve_target

IDENTITY = {"step": None, "sampling": {"samples": 2, "temperature": 1.0}}


@contextmanager
def silent(name, total):
    yield lambda n=1: None


class Bench:
    """A tiny w4a16 policy, two tasks of three and five prompts, and their rewards."""

    def __init__(self, path):
        self.opened = open_policy(resolve_target(str(path), quant={"scheme": "w4a16", "group_size": 32}))
        reward = [{"name": "regex", "options": {"pattern": "[a-z]"}}]
        tasks = [
            EvalTask(name=name, data={"source": "task:arithmetic", "task": {"size": size, "seed": size}}, reward=reward)
            for name, size in (("three", 3), ("five", 5))
        ]
        self.tasks = load_tasks(tasks, self.opened.tokenizer)
        self.rewards = TaskRewards(self.tasks, None, None)

    def settings(self, **values) -> Settings:
        config = EvaluationConfig(**{"samples": 2, "max_response_length": 6, **values})
        return Settings.of(config, 0, (), self.opened.sampling(1, 1, None).stop_token_ids)

    def run(self, done, settings=None, tasks=None, check=lambda: None):
        rows, save = (done, done.extend) if isinstance(done, list) else (done.rows, done.append)
        return evaluate(
            self.opened.engine,
            self.opened.policy.version,
            tasks or self.tasks,
            settings or self.settings(),
            self.rewards,
            rows,
            save,
            silent,
            check,
        )


@pytest.fixture(scope="module")
def bench(tiny_model):
    bench = Bench(tiny_model("llama"))
    yield bench
    bench.rewards.close()
    bench.opened.close()


@pytest.fixture(scope="module")
def whole(bench):
    rows = []
    return bench.run(rows), rows


def test_every_prompt_has_its_samples_in_order_and_the_summary_counts_them(whole):
    summary, rows = whole
    expected = [(t, p, s) for t, n in (("three", 3), ("five", 5)) for p in range(n) for s in range(2)]
    assert [(r["task"], r["prompt_id"], r["sample"]) for r in rows] == expected
    assert 0 < sum(r["correct"] for r in rows) < len(rows)
    for entry, count in zip(summary["tasks"], (3, 5), strict=True):
        own = [r for r in rows if r["task"] == entry["name"]]
        assert entry["prompts"] == count
        assert entry["avg"]["mean"] == pytest.approx(sum(r["correct"] for r in own) / len(own))
        assert entry["length_mean"] == pytest.approx(sum(r["tokens"] for r in own) / len(own))
    means = [entry["avg"]["mean"] for entry in summary["tasks"]]
    assert summary["overall"]["avg"]["mean"] == pytest.approx(sum(means) / 2)
    assert metrics_of(summary)["eval/five/pass@2"] == summary["tasks"][1]["pass"]["2"]["mean"]


def test_results_do_not_depend_on_batches(bench, whole, monkeypatch):
    monkeypatch.setattr(runner, "BATCH_RESPONSES", 4)
    assert bench.run(rows := []) == whole[0] and rows == whole[1]


def test_results_of_a_task_do_not_depend_on_the_other_tasks(bench, whole):
    bench.run(rows := [], tasks=bench.tasks[1:])
    assert rows == [r for r in whole[1] if r["task"] == "five"]


def test_tasks_draw_from_streams_of_their_own_apart_from_trainings(bench):
    seeds = {bench.settings(seed=seed).sampling(task).seed for seed in (0, 1) for task in ("three", "five")}
    assert len(seeds) == 4 and all(2**63 <= seed < 2**64 for seed in seeds)


def test_a_completion_is_correct_from_the_threshold_on(bench, whole):
    bench.run(rows := [], bench.settings(correct_threshold=0.0))
    assert all(r["correct"] for r in rows)
    presets = [replace(task, correct_at=1.0) for task in bench.tasks]
    assert bench.run([], bench.settings(correct_threshold=0.0), presets) == whole[0]
    assert [r["completion"] for r in rows] == [r["completion"] for r in whole[1]]


@contextmanager
def begun(folder: Path) -> Iterator[ResultsDirectory]:
    """The directory of one evaluation, from where it stopped."""
    with ResultsDirectory.open(folder / "r", IDENTITY) as directory:
        directory.begin({"weights": "a"}, 2)
        yield directory


def test_an_interrupted_evaluation_continues_to_the_same_bytes(bench, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "BATCH_RESPONSES", 4)
    calls = 0

    def check():
        nonlocal calls
        calls += 1
        if calls == 24:
            raise KeyboardInterrupt(signal.SIGINT)

    with begun(tmp_path) as directory, pytest.raises(KeyboardInterrupt):
        bench.run(directory, check=check)
    with begun(tmp_path) as directory:
        assert 0 < len(directory.rows) < 16
        assert bench.run(directory) == whole[0]
        assert directory.rows == whole[1]
        assert directory.completions.read_text() == "".join(json.dumps(r) + "\n" for r in whole[1])


def test_a_torn_end_is_drawn_again(bench, whole, tmp_path):
    """A cut through several prompts."""
    with begun(tmp_path) as directory:
        bench.run(directory)
        path = directory.completions
    complete = path.read_bytes()
    path.write_bytes(complete[:-3000])
    with begun(tmp_path) as directory:
        assert len(directory.rows) % 2 == 0 and len(directory.rows) < 16
        assert bench.run(directory) == whole[0]
    assert path.read_bytes() == complete


@pytest.mark.parametrize(
    "identity, weights, said",
    [({**IDENTITY, "step": 3}, "a", "step is null there, 3 here"), (IDENTITY, "b", 'weights is "a" there, "b" here')],
)
def test_results_of_another_evaluation_are_refused_and_left_alone(tmp_path, identity, weights, said):
    with begun(tmp_path) as directory:
        directory.append([{"task": "t", "prompt_id": 0, "sample": 0}, {"task": "t", "prompt_id": 0, "sample": 1}])
    before = {p.name: p.read_bytes() for p in (tmp_path / "r").iterdir()}
    with pytest.raises(UserError, match="holds the results of another evaluation") as caught:  # noqa: SIM117
        with ResultsDirectory.open(tmp_path / "r", identity) as directory:
            directory.begin({"weights": weights}, 2)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert {p.name: p.read_bytes() for p in (tmp_path / "r").iterdir()} == before


def test_a_directory_of_something_else_or_in_use_is_refused_and_a_refused_start_leaves_none(tmp_path):
    with pytest.raises(UserError, match="no model"), ResultsDirectory.open(tmp_path / "eval" / "r", IDENTITY):
        raise UserError("no model")
    assert list(tmp_path.iterdir()) == []
    with ResultsDirectory.open(tmp_path / "r", IDENTITY), pytest.raises(UserError, match="in use by another"):
        ResultsDirectory.open(tmp_path / "r", IDENTITY)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"it holds 'notes\.txt' but no evaluation\.json"):
        ResultsDirectory.open(tmp_path, IDENTITY)
    with pytest.raises(UserError, match="not a directory"):
        ResultsDirectory.open(tmp_path / "notes.txt", IDENTITY)
