"""From rollouts to minibatches and micro-batches."""

from __future__ import annotations

import random

import pytest
import torch

from qarl.training.batch import Batch, build_batch, micro_batches, minibatches
from qarl.types import Prompt, Rollout


def rollout(prompt: int, sample: int, tokens: int = 2) -> Rollout:
    return Rollout(prompt, sample, [7] * tokens, [-0.5] * tokens, "stop", 0, 0, "x")


def prompt(index: int) -> Prompt:
    return Prompt(index, [index, index], f"p{index}", {})


def ragged(seed: int, groups: int = 5, n: int = 4) -> Batch:
    rng = random.Random(seed)
    responses = [[1] * rng.randint(1, 20) for _ in range(groups * n)]
    index = [g for g in range(groups) for _ in range(n)]
    prompts = [[g] * (3 + 4 * g) for g in index]
    empty = [torch.zeros(len(r)) for r in responses]
    return Batch(prompts, responses, index, torch.zeros(groups * n), empty, list(empty), list(empty), list(empty))


def test_advantages_compare_responses_of_one_prompt():
    prompts = [prompt(8), prompt(3)]
    rollouts = [rollout(8, 0), rollout(8, 1), rollout(3, 0), rollout(3, 1)]
    batch = build_batch(prompts, rollouts, [0.0, 2.0, 10.0, 10.0], "grpo_no_std")
    assert batch.advantages.tolist() == [-1.0, 1.0, 0.0, 0.0]
    assert batch.groups == [0, 0, 1, 1] and batch.prompts[2] == [3, 3]


def test_a_prompt_dealt_twice_is_two_groups():
    prompts = [prompt(8), prompt(8)]
    rollouts = [rollout(8, 0), rollout(8, 1), rollout(8, 0), rollout(8, 1)]
    batch = build_batch(prompts, rollouts, [0.0, 2.0, 5.0, 9.0], "grpo_no_std")
    assert batch.groups == [0, 0, 1, 1] and batch.advantages.tolist() == [-1.0, 1.0, -2.0, 2.0]


def test_rollouts_in_another_order_than_the_prompts_are_a_bug():
    with pytest.raises(AssertionError, match="order of the prompts"):
        build_batch([prompt(1), prompt(2)], [rollout(2, 0), rollout(1, 0)], [0.0, 0.0], "grpo")


@pytest.mark.parametrize("size", [4, 5, 10, 20])
def test_minibatches_hold_every_response_once(size):
    groups = [g for g in range(5) for _ in range(4)]
    parts = minibatches(groups, size, seed=0, step=3, epoch=1)
    assert sorted(i for part in parts for i in part) == list(range(20))
    assert [len(part) for part in parts] == [size] * (20 // size)


def test_minibatches_keep_groups_whole_where_they_fit():
    groups = [g for g in range(5) for _ in range(4)]
    parts = minibatches(groups, 8, seed=0, step=0, epoch=0) + minibatches(groups, 4, seed=0, step=0, epoch=0)
    assert all(len({groups[i] for i in part}) == len(part) // 4 for part in parts)


def test_minibatches_are_shuffled_by_step_epoch_and_seed_and_by_nothing_else():
    groups = list(range(64))
    orders = {str(minibatches(groups, 8, *key)) for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)]}
    assert len(orders) == 4


@pytest.mark.parametrize("max_tokens", [1, 25, 60, 10_000])
def test_micro_batches_hold_every_response_once_within_the_budget(max_tokens):
    for seed in range(20):
        batch = ragged(seed)
        indices = random.Random(seed).sample(range(20), 13)
        parts = micro_batches(batch, indices, max_tokens)
        assert sorted(i for part in parts for i in part) == sorted(indices)
        assert all(len(part) == 1 or batch.forward_tokens(part) <= max_tokens for part in parts)


def test_micro_batches_fill_the_budget():
    batch = ragged(0)
    assert len(micro_batches(batch, list(range(20)), batch.forward_tokens(list(range(20))))) == 1


def test_micro_batches_keep_groups_side_by_side():
    batch = ragged(1)
    order = [batch.groups[i] for part in micro_batches(batch, list(range(20)), 60) for i in part]
    assert len([g for k, g in enumerate(order) if k == 0 or order[k - 1] != g]) == 5


def test_forward_tokens_count_a_prompt_once_for_neighbours_that_share_it():
    batch = ragged(2)
    a, b, c = (len(batch.responses[i]) for i in (0, 1, 4))
    assert batch.forward_tokens([0, 1, 4]) == a + b + c + 3 + 7
    assert batch.forward_tokens([0, 4, 1]) == a + b + c + 3 + 7 + 3
