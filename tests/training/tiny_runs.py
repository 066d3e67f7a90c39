"""Tiny configurations, the parts of a run without reward workers, and whole runs in separate processes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from forks import Fork
from tiny_models import tiny_settings

from qarl.batch.batch import Batch, build_batch
from qarl.batch.observer import Observer
from qarl.config import Config
from qarl.diagnostics.probe import Probe
from qarl.distributed.ranks import SingleProcess
from qarl.memory.sizes import decide_sizes
from qarl.policy.load import load_model, load_tokenizer
from qarl.policy.policy import Policy
from qarl.rollout.engine import SamplingParams
from qarl.rollout.native.engine import NativeEngine
from qarl.training.learner import Learner
from qarl.training.optim import Optimizer
from qarl.training.setup import build_policy, build_sampling
from qarl.training.step import learn
from qarl.training.updates import LocalUpdates
from qarl.types import Prompt

ROOT = Path(__file__).parents[2]


# For tests that do not look at a report's charts: all charts are copies of the first, which saves seconds.
ONE_PICTURE = """
import contextlib
from qarl.report import charts, page
page.render_in_parallel = lambda sections: contextlib.nullcontext()
real, made = charts.save, {}
def save(chart, form):
    if form not in made:
        made[form] = real(chart, form)
    return made[form]
charts.save = save
"""


def settings(path: Path, /, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return `tiny_settings` for a run of six steps."""
    own = {"train": {"steps": 6}, "checkpoint": {"every": 2}}
    return tiny_settings(path, **{name: own.get(name, {}) | sections.get(name, {}) for name in {**own, **sections}})


@dataclass
class Parts:
    """Everything that a step needs, except data, rewards and records."""

    config: Config
    policy: Policy
    optimizer: Optimizer
    learner: Learner
    engine: NativeEngine
    sampling: SamplingParams

    def batch(self, reward: Callable[[list[int]], float], seed: int = 1) -> Batch:
        """Sample a batch with the current policy. reward: Maps the token ids of a response to its reward."""
        prompts = [Prompt(i, [5 + i, 70, 90 + i], f"prompt {i}", {}) for i in range(self.config.train.prompts_per_step)]
        self.engine.publish(self.policy.current)
        sampling = replace(self.sampling, seed=seed, record_routing=self.config.records_routing)
        rollouts = self.engine.generate(prompts, sampling, self.policy.version)
        rewards = [reward(rollout.token_ids) for rollout in rollouts]
        advantage, replays = self.config.objective.advantage, self.config.model.routing == "replay"
        return build_batch(prompts, rollouts, rewards, advantage, self.policy.version, replays=replays)

    def learn(self, batch: Batch, step: int = 0, watch: Observer | None = None) -> dict[str, float]:
        """Run `learn`. Return the learner's metrics, and as `learner_tokens` the number of tokens in its forwards."""
        watch = watch or Observer()
        learn(self.learner, batch, step, watch)
        metrics = self.learner.metrics(batch)
        watch.learned(batch, metrics)
        return metrics | {"learner_tokens": float(self.learner.totals.forward_tokens)}

    def forwards(self) -> list[int]:
        """Return a list to which each later forward of the learner appends the indices of its responses."""
        ran, logprobs = [], self.learner.logprobs
        self.learner.logprobs = lambda part, *more, **named: ran.extend(part.indices) or logprobs(part, *more, **named)
        return ran

    def probe(self, *due: str) -> Probe:
        return Probe(
            self.policy,
            self.learner.objective,
            self.config,
            self.sampling.truncation,
            due,
            True,
            self.sampling.stop_token_ids,
        )

    def masters(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.policy.named_parameters()}


def live(run: Parts, seed: int = 1) -> Batch:
    """Return a batch in which no response has advantage 0."""
    batch = run.batch(lambda tokens: 0.0, seed)
    batch.advantages = torch.linspace(-1.0, 1.6, len(batch))  # 0 is not among them
    return batch


def parts(path: Path, /, **sections: dict[str, Any]) -> Parts:
    config = decide_sizes(Config.model_validate(settings(path, **sections)), "cpu")
    policy = build_policy(config, load_model(config.model), torch.device("cpu"))
    tokenizer = load_tokenizer(config.model)
    sampling = build_sampling(config, policy, tokenizer)
    updates = LocalUpdates(policy, config)
    learner = Learner(policy, updates, config, sampling.truncation, SingleProcess())
    policy.keep_reference()
    engine = NativeEngine(policy.sampler, tokenizer, config.rollout)
    return Parts(config, policy, updates.optimizer, learner, engine, sampling)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Run torch with one thread, which is faster for such small matrices."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def llama(tiny_model) -> Path:
    return tiny_model("llama")


class Started:
    """A running process."""

    def __init__(self, fork: Fork, out: Path, err: Path) -> None:
        self._fork, self.pid, self._out, self._err = fork, fork.pid, out, err

    def wait(self) -> "Finished":
        code = self._fork.wait()
        return Finished(code, self._out.read_text(errors="replace"), self._err.read_text(errors="replace"))


@dataclass
class Finished:
    code: int  # negative: the signal that ended it
    out: str
    err: str


class Qarl:
    """Runs `qarl` command lines in `cwd`, one at a time. tier: Key of `forks.TIERS`."""

    def __init__(self, cwd: Path, tier: str = "fork_server") -> None:
        self.cwd, self._tier = cwd, tier
        self._last: Fork | None = None

    def start(self, *argv: object, before: str = "", cwd: Path | None = None, program: Path | str = "qarl") -> Started:
        """Start a process. before: Python code to run first. program: A Python file to run instead of `qarl`."""
        if self._last is not None:  # a test that failed did not wait for it
            self._last.kill()
            self._last.wait()
        out, err = self.cwd / "output.out", self.cwd / "output.err"
        order = {"argv": [str(a) for a in argv], "cwd": str(cwd or self.cwd), "before": before, "program": str(program)}
        self._last = Fork(self._tier, out, err, **order)
        return Started(self._last, out, err)

    def run(self, *argv: object, **order: Any) -> Finished:
        """Start a process and wait for its end. order: See `start`."""
        return self.start(*argv, **order).wait()


def write_config(path: Path, data: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(data))
    return path
