"""A micro-batch on a GPU: nothing between two optimizer steps makes the host wait for the device."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from qarl_kernels.logprob import Truncation
from tiny_runs import settings

from qarl.batch.batch import Batch, Part
from qarl.batch.columns import Column
from qarl.batch.observer import Observer
from qarl.config import Config
from qarl.distributed.ranks import SingleProcess
from qarl.memory.sizes import decide_sizes
from qarl.policy.load import load_model
from qarl.training.learner import Learner
from qarl.training.setup import build_policy, set_determinism
from qarl.training.step import learn
from qarl.training.updates import LocalUpdates

GPU = torch.device("cuda", 0)
CORRECTION = {"level": "token", "mode": "truncate", "upper": 2.0, "veto": 1e-4}
RUNS = [
    ("bf16", {}, {"name": "grpo"}, {}, {}),
    ("w4a16", {"group_size": 32}, {"name": "tbpo"}, {}, {"min_p": 0.01}),
    ("fp8", {}, {"name": "grpo", "kl_coef": 0.1, "entropy_coef": 0.01}, CORRECTION, {}),
    ("w8a8", {"learner": "full_precision"}, {"name": "grpo", "ratio": "shadow"}, {}, {}),
]


class Watch(Observer):
    """From a step's begin on, what waits for the GPU raises, unless it stands inside `allowed`."""

    def __init__(self) -> None:
        self.parts: list[Part] = []

    def begin(self, batch: Batch) -> None:
        torch.cuda.set_sync_debug_mode("error")

    def forward(self, part: Part, logps: object) -> None:
        self.parts.append(part)


@contextmanager
def allowed() -> Iterator[None]:
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def random_batch(version: int, n: int = 4, groups: int = 4) -> Batch:
    """Responses of 5 to 24 tokens to prompts of 3 to 6; no advantage is 0."""
    generator = torch.Generator().manual_seed(version)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 250, (count,), generator=generator).tolist()

    of_group = [tokens(3 + g) for g in range(groups)]
    responses = [tokens(5 + (7 * i) % 20) for i in range(n * groups)]
    sampled = Column([-torch.rand(len(response), generator=generator) for response in responses])
    return Batch(
        version,
        GPU,
        [of_group[i // n] for i in range(n * groups)],
        responses,
        [i // n for i in range(n * groups)],
        torch.linspace(-1.0, 1.6, n * groups),
        sampled,
    )


@pytest.mark.parametrize(
    ("scheme", "quant", "objective", "correction", "rollout"), RUNS, ids=[scheme for scheme, *_ in RUNS]
)
def test_only_an_update_waits_for_the_gpu(tiny_model, scheme, quant, objective, correction, rollout) -> None:
    sections = settings(
        tiny_model("qwen3"),
        quant={"scheme": scheme, "group_size": None, **quant},
        objective=objective,
        correction=correction,
        rollout=rollout,
        train={"minibatch_size": 8, "epochs": 2, "micro_batch_tokens": 60},
    )
    config = decide_sizes(Config.model_validate(sections), "cuda")
    set_determinism(config)
    policy = build_policy(config, load_model(config.model), GPU)
    drawn = config.rollout
    truncation = Truncation(drawn.temperature, drawn.top_k, drawn.top_p, config.min_p)
    learner = Learner(policy, LocalUpdates(policy, config), config, truncation, SingleProcess())
    if learner.objective.needs.reference:
        policy.keep_reference()
    learn(learner, random_batch(policy.version), 0, Observer())  # compiles kernels, and makes the optimizer's state

    update = learner.update

    def update_may_wait() -> float:
        with allowed():
            return update()

    learner.update = update_may_wait
    batch, watch = random_batch(policy.version), Watch()
    try:
        learn(learner, batch, 1, watch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    metrics = learner.metrics(batch)
    assert len(watch.parts) >= 8 and metrics["policy/skipped_steps"] == 0.0 and metrics["policy/grad_norm"] > 0.0
    assert all(values.device.type == "cpu" for values in batch.logp_old)
