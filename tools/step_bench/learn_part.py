"""The learner's whole phase of a step: every micro-batch, its backward, and the update."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

import torch
from model_sizes import Shape
from qarl_kernels.logprob import Truncation

from qarl.distributed.ranks import Alone
from qarl.policy.policy import Policy
from qarl.training.batch import Batch, build_batch
from qarl.training.learner import Learner
from qarl.training.observer import Observers
from qarl.training.step import learn
from qarl.training.updates import LocalUpdates
from qarl.types import Prompt, Rollout
from step_bench.learner_part import make_policy
from step_bench.measure import Record, timed
from step_bench.settings import learner_config

PROMPT_TOKENS = (62, 81)  # of a prompt, those of a step's questions


def learn_records(options: argparse.Namespace, shape: Shape, device: torch.device) -> Iterator[Record]:
    """All that the learner does with a step's responses, as training runs it: micro-batches, backwards, one update.

    kept: in memory that the process holds from the step before. fresh: where it gave all its spare memory back, as a
    run does whose sampler wakes on the same GPU. allocations: of segments, that the driver was asked for in one call.
    """
    longest = PROMPT_TOKENS[1] + options.new_tokens
    config = learner_config(options, shape, device, longest)
    train = config.train.model_copy(update={"prompts_per_step": options.prompts})
    rollout = config.rollout.model_copy(update={"n": options.responses})
    config = config.model_copy(update={"train": train, "rollout": rollout})
    policy = make_policy(options, shape, device, config, longest)
    learner = Learner(policy, LocalUpdates(policy, config), config, Truncation(), Alone())
    draw = torch.Generator().manual_seed(options.seed)
    batch, tokens = drawn_batch(options, shape, policy, draw), 0

    def kept() -> None:
        nonlocal batch
        batch = drawn_batch(options, shape, policy, draw)

    def fresh() -> None:
        kept()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def call() -> None:
        nonlocal tokens
        learn(learner, batch, 0, Observers([]))
        tokens = learner.totals.forward_tokens

    labels = {"new_tokens": options.new_tokens, "logprob_chunk": config.train.logprob_chunk}
    for what, prepare in (("kept", kept), ("fresh", fresh)):
        measured = timed(call, device, options.warmup, options.iterations, prepare)
        prepare()
        before = driver_allocations(device)
        call()
        measured["allocations"] = driver_allocations(device) - before
        yield labels | {"what": what, "tokens": tokens} | measured | {"tokens_per_s": tokens / measured["seconds"]}


def driver_allocations(device: torch.device) -> int:
    """Segments of memory that torch has got from the driver so far."""
    return torch.cuda.memory_stats(device)["segment.all.allocated"] if device.type == "cuda" else 0


def drawn_batch(options: argparse.Namespace, shape: Shape, policy: Policy, draw: torch.Generator) -> Batch:
    """Random responses to random prompts, scored at random, as a sampler that agrees about as well as vLLM reports."""

    def ids(count: int) -> list[int]:
        return torch.randint(3, shape.vocabulary, (count,), generator=draw).tolist()

    low, high = PROMPT_TOKENS
    lengths = torch.randint(low, high, (options.prompts,), generator=draw).tolist()
    prompts = [Prompt(i, ids(length), "", {}) for i, length in enumerate(lengths)]
    likely = -math.log(shape.vocabulary)
    rollouts = [
        Rollout(prompt.id, i, ids(options.new_tokens), [likely] * options.new_tokens, "length", policy.version, 0, "")
        for prompt in prompts
        for i in range(options.responses)
    ]
    rewards = torch.rand(len(rollouts), generator=draw).tolist()
    return build_batch(prompts, rollouts, rewards, "grpo", policy.version, policy.device)
