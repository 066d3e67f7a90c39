"""The RL step alone: its order, its calls of observers, and the decisions it takes."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tiny_runs import Parts, parts, settings

from qarl.batch.batch import Batch, Part
from qarl.batch.observer import Observer, Observers
from qarl.config import Config
from qarl.errors import UserError
from qarl.rewards import RewardResult
from qarl.terminal.run_console import RunConsole
from qarl.training import setup, step
from qarl.training.setup import Run
from qarl.types import Prompt

pytestmark = pytest.mark.usefixtures("one_thread")


class Diary(Observer):
    """Observer that records its calls, with the policy version at each call."""

    def __init__(self, run: Parts) -> None:
        self._policy = run.policy
        self.lines: list[tuple[Any, ...]] = []
        self.done = 0

    def _note(self, *line: Any) -> None:
        self.lines.append((*line, self._policy.version))

    @contextmanager
    def phase(self, name: str, responses: int | None) -> Iterator[None]:
        self._note(name, "begins")
        self.done = 0
        yield
        self._note(name, "ends")
        assert responses is None or self.done == responses

    def progress(self, responses: int) -> None:
        self.done += responses

    def scored(self, prompts: list[Prompt], rollouts: list, scores: RewardResult) -> None:
        self._note("scored", len(prompts), len(rollouts), len(scores.total))
        assert scores.by_function["own"] == [float(sum(rollout.token_ids)) for rollout in rollouts]

    def begin(self, batch: Batch) -> None:
        assert batch.version == self._policy.version and not batch.logp_old.known(batch.whole())
        self._note("begin", len(batch))

    def minibatch(self, minibatch: Part) -> None:
        self._note("minibatch", len(minibatch))

    def forward(self, part: Part, logps: Any) -> None:
        self._note("forward", len(part))

    def update(self, grad_norm: float) -> None:
        self._note("update")

    def learned(self, batch: Batch, metrics: dict[str, float]) -> None:
        assert all(column.known(batch.whole()) for column in (batch.logp_old, batch.logp))
        self._note("learned", metrics["policy/version"])


def as_run(parts_: Parts) -> Run:
    """Return the parts as a run, with a stream of fixed prompts and fixed rewards."""
    prompts = [Prompt(i, [5 + i, 70, 90 + i], f"prompt {i}", {"n": i}) for i in range(4)]

    class Rewards:
        def score(self, texts: list, asked: list, columns: dict, ids: list, share: None) -> RewardResult:
            assert asked == [f"prompt {i // 4}" for i in range(16)] and columns == {"n": [i // 4 for i in range(16)]}
            total = [float(i % 5) for i in range(len(ids))]
            own = [float(sum(tokens)) for tokens in ids]
            return RewardResult(total=total, by_function={"own": own}, failed={}, messages=[])

    stream = SimpleNamespace(next=lambda count: prompts[:count], record_rewards=lambda asked, rewards: None)
    return SimpleNamespace(**vars(parts_), stream=stream, rewards=Rewards(), source=None)  # type: ignore[return-value]


def test_a_step_samples_scores_learns_and_publishes_in_this_order(llama):
    run = parts(llama, train={"minibatch_size": 8})
    run.engine.publish(run.policy.current)
    diary = Diary(run)
    step.rl_step(run.config, as_run(run), 0, Observers([diary]))
    assert diary.lines == [
        ("rollout", "begins", 0),
        ("rollout", "ends", 0),
        ("reward", "begins", 0),
        ("reward", "ends", 0),
        ("scored", 4, 16, 16, 0),
        ("learner", "begins", 0),
        ("begin", 16, 0),
        ("minibatch", 8, 0),
        ("forward", 8, 0),
        ("update", 1),
        ("minibatch", 8, 1),
        ("forward", 8, 1),
        ("update", 2),
        ("learned", 2.0, 2),
        ("learner", "ends", 2),
        ("publish", "begins", 2),
        ("publish", "ends", 2),
    ]
    assert run.engine.version == run.policy.version == 2


@pytest.mark.parametrize("deployed", [False, True])
def test_the_engine_may_wake_before_the_last_update_but_not_before_the_first_or_a_later_forward(
    llama, monkeypatch, deployed
):
    run = parts(llama, train={"minibatch_size": 8}, diagnostics={"deployed_every": 1} if deployed else {})
    run.engine.publish(run.policy.current)
    whole, told = as_run(run), []
    monkeypatch.setattr(run.engine, "wake", lambda: told.append(run.policy.version))
    for number in range(2):
        step.rl_step(run.config, whole, number, Observers([]))
    # Two updates a step. In the first step the optimizer has no state yet.
    assert told == ([2, 4] if deployed else [2, 3, 4])


def test_a_failed_build_closes_every_part_and_raises_the_first_error(llama, tmp_path, monkeypatch):
    closed = []

    def part(name: str) -> SimpleNamespace:
        def close() -> None:
            closed.append(name)
            raise OSError(f"{name} does not close")

        return SimpleNamespace(close=close)

    data = SimpleNamespace(inputs=None, stream=None, tasks=[])
    monkeypatch.setattr(setup, "_open_data", lambda *_: (data, part("rewards"), part("task rewards")))
    monkeypatch.setattr(setup, "require_same_inputs", lambda *_: None)
    monkeypatch.setattr(setup, "prelaunch", lambda *_: part("sampler"))
    monkeypatch.setattr(setup, "start_async", Mock(side_effect=UserError("data of the ranks differ")))
    config = Config.model_validate(settings(llama, checkpoint={"resume": "never"}))
    with pytest.raises(UserError, match="data of the ranks differ"):
        setup.build_run(config, torch.device("cpu"), RunConsole("none"), tmp_path / "rewards.log")
    assert closed == ["sampler", "rewards", "task rewards"]


def test_a_dense_model_is_refused_what_needs_experts(llama):
    config = Config.model_validate(settings(llama, objective={"router_aux_coef": 0.1}))
    with pytest.raises(UserError, match=r"router_aux_coef: 0\.1: the model has no experts"):
        setup.require_mixture(config, setup.load_architecture(config.model))
