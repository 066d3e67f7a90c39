"""From rollouts to minibatches and micro-batches."""

import random
import weakref

import pytest
import torch

from qarl.batch.batch import CPU, Batch, Part, build_batch, rounds
from qarl.batch.columns import Column, KeptColumn
from qarl.batch.micro_batches import EVEN_LENGTH, assign
from qarl.types import Prompt, Rollout

GPU = torch.device("cuda")  # named, never asked


def rollout(prompt: int, sample: int, tokens: int = 2) -> Rollout:
    return Rollout(prompt, sample, [7] * tokens, [-0.5] * tokens, "stop", 0, 0, "x")


def prompt(index: int) -> Prompt:
    return Prompt(index, [index, index], f"p{index}", {})


def ragged(seed: int, groups: int = 5, n: int = 4) -> Batch:
    rng = random.Random(seed)
    responses = [[1] * rng.randint(1, 20) for _ in range(groups * n)]
    index = [g for g in range(groups) for _ in range(n)]
    prompts = [[g] * (3 + 4 * g) for g in index]
    sampled = Column([torch.rand(len(r), generator=torch.Generator().manual_seed(seed)) for r in responses])
    return Batch(3, CPU, prompts, responses, index, torch.zeros(groups * n), sampled)


def of_groups(groups: list[int]) -> Batch:
    count = len(groups)
    sampled = Column([torch.zeros(1)] * count)
    return Batch(0, CPU, [[g] for g in groups], [[1]] * count, groups, torch.zeros(count), sampled)


def orders(parts: list[Part]) -> list[list[int]]:
    return [list(part.indices) for part in parts]


def test_advantages_compare_responses_of_one_prompt():
    prompts = [prompt(8), prompt(3)]
    rollouts = [rollout(8, 0), rollout(8, 1), rollout(3, 0), rollout(3, 1)]
    batch = build_batch(prompts, rollouts, [0.0, 2.0, 10.0, 10.0], "grpo_no_std", 0)
    assert batch.advantages.tolist() == [-1.0, 1.0, 0.0, 0.0]
    assert batch.groups == [0, 0, 1, 1] and batch.prompts[2] == [3, 3]


@pytest.mark.parametrize("size", [4, 5, 10, 20])
def test_minibatches_hold_every_response_once(size):
    groups = [g for g in range(5) for _ in range(4)]
    parts = orders(of_groups(groups).minibatches(size, seed=0, step=3, epoch=1))
    assert sorted(i for part in parts for i in part) == list(range(20))
    assert [len(part) for part in parts] == [size] * (20 // size)


def test_minibatches_are_shuffled_by_step_epoch_and_seed_and_by_nothing_else():
    batch, keys = of_groups(list(range(64))), [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)]
    assert len({str(orders(batch.minibatches(8, *key))) for key in keys}) == 4


def test_forward_tokens_count_a_prompt_once_for_neighbours_that_share_it():
    batch = ragged(2)
    a, b, c = (len(batch.responses[i]) for i in (0, 1, 4))
    assert batch.part([0, 1, 4]).forward_tokens == a + b + c + 3 + 7
    assert batch.part([0, 4, 1]).forward_tokens == a + b + c + 3 + 7 + 3
    twice = build_batch([prompt(8), prompt(8)], [rollout(8, 0), rollout(8, 0)], [0.0, 0.0], "grpo", 0).whole()
    assert twice.forward_tokens == 2 + 2 + 2 == twice.rows + 2  # two groups, whose prompts share rows


def test_the_budget_counts_a_prompt_once_that_groups_share():
    ids = 8, 9, 8
    whole = build_batch([prompt(i) for i in ids], [rollout(i, 0) for i in ids], [0.0] * 3, "grpo", 0).whole()
    first, second = whole.micro_batches(6)
    assert (first.indices, first.forward_tokens, second.indices) == ((0, 2), 2 + 2 + 2, (1,))
    assert first.work == whole.batch.part([0]).work + 2 * (1 + 3 / EVEN_LENGTH)
    assert [part.counted.start for part in whole.micro_batches(1)] == [0, 2, 0]


def test_a_column_filled_in_parts_is_read_in_any_order_and_cut():
    batch = ragged(3)
    whole = batch.whole()
    values = torch.arange(whole.tokens, dtype=torch.float32, requires_grad=True)
    by_response = dict(enumerate(values.detach().split([len(r) for r in batch.responses])))
    shuffled = random.Random(0).sample(range(20), 20)
    for part in batch.part(shuffled).micro_batches(50):
        assert not batch.logp_old.known(whole)
        batch.logp_old.fill(part, torch.cat([by_response[i] for i in part.indices]).requires_grad_())
    assert batch.logp_old.known(whole) and not batch.logp.known(batch.part([0]))
    assert torch.equal(whole.logp_old, values.detach()) and not whole.logp_old.requires_grad
    for indices in ([4, 0, 19], shuffled):
        assert torch.equal(batch.part(indices).logp_old, torch.cat([by_response[i] for i in indices]))


def test_a_response_that_was_not_filled_in_is_not_read():
    batch = ragged(4)
    batch.logp_old.fill(batch.part([2]), torch.zeros(len(batch.responses[2])))
    with pytest.raises(AssertionError, match="response 5 has not been filled"):
        batch.part([2, 5]).logp_old.sum()


def test_a_served_part_is_the_part_itself_unless_the_batch_has_records_and_no_cycle_keeps_the_batch():
    batch = ragged(5)
    part, alive = batch.whole(), weakref.ref(batch)
    assert part.served is part  # with all that it has cached, such as the experts of its rows
    batch.kept = KeptColumn(len(batch))
    assert part.served.batch.kept is None and part.served.batch is batch.served
    del batch, part
    assert alive() is None


# --- micro-batches of similar work, which a GPU gets


@pytest.mark.parametrize("max_tokens", [1, 25, 60, 10_000])
def test_micro_batches_hold_every_response_once_within_the_budget_and_a_gpu_has_as_many_in_the_same_order(max_tokens):
    for seed in range(20):
        batch = ragged(seed)
        indices = random.Random(seed).sample(range(20), 13)
        by_tokens, by_work = (batch.part(indices, device).micro_batches(max_tokens) for device in (CPU, GPU))
        assert len(by_work) == len(by_tokens)
        assert sorted(i for part in by_tokens for i in part.indices) == sorted(indices)
        assert [i for part in by_work for i in part.indices] == [i for part in by_tokens for i in part.indices]
        assert all(len(part) == 1 or part.forward_tokens <= max_tokens for part in [*by_tokens, *by_work])


# --- several ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_rounds_hold_every_part_once_and_only_the_last_has_idle_ranks(ranks):
    for seed in range(20):
        rng = random.Random(seed)
        works = [rng.choice([1.0, 2.0, rng.uniform(0, 9)]) for _ in range(rng.randint(0, 11))]
        dealt = assign(list(range(len(works))), works, ranks)
        assert all(len(round_) == ranks for round_ in dealt)
        assert all(None not in round_ for round_ in dealt[:-1]) and all(any(p is not None for p in r) for r in dealt)
        found = [part for round_ in dealt for part in round_ if part is not None]
        assert sorted(found) == list(range(len(works)))
        if ranks == 1:
            assert found == list(range(len(works)))
            continue
        # No other rounds take less: the longest of each are what they must at least be.
        longest = sum(max(works[p] for p in round_ if p is not None) for round_ in dealt)
        assert longest == pytest.approx(sum(sorted(works, reverse=True)[::ranks]))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_micro_batches_of_ranks_are_within_the_budget_and_take_no_longer(device, ranks):
    def longest(parts: list[Part]) -> float:
        return sum(max(part.work for part in round_ if part is not None) for round_ in rounds(parts, ranks))

    shorter = 0
    for seed in range(20):
        whole = ragged(seed).whole(torch.device(device))
        for budget in (25, 60, 10_000):
            alone, dealt = whole.micro_batches(budget), whole.micro_batches(budget, ranks)
            assert sorted(i for part in dealt for i in part.indices) == list(range(20))
            assert all(len(part) == 1 or part.forward_tokens <= budget for part in dealt)
            if ranks == 1:
                assert orders(dealt) == orders(alone)
                continue
            assert longest(dealt) <= longest(alone)
            shorter += longest(dealt) < longest(alone)
            assert budget < 10_000 or len(dealt) >= ranks
    assert ranks == 1 or shorter > 10
    two = ragged(0).part([3, 4])
    assert rounds(two.micro_batches(10_000, 5), 5)[0].count(None) == 3, "more ranks than responses"
    assert rounds(ragged(0).part([]).micro_batches(10_000, 5), 5) == []


def test_stale_responses_and_their_minibatch_are_run_before_the_first_update():
    """A training forward fills `logp_old` of a whole part. So a minibatch with any stale response is run ahead."""
    batch = ragged(0, groups=4, n=2)
    first, second = batch.part([0, 1, 2, 3]), batch.part([4, 5, 6, 7])

    def ahead() -> list[tuple[int, tuple[int, ...]]]:
        return [(version, part.indices) for version, part in batch.in_advance([first, second])]

    assert ahead() == [(3, (4, 5, 6, 7))]
    mixed = [1] * (len(batch.responses[6]) - 1) + [3]
    batch.versions = [None] * 6 + [mixed, [2] * len(batch.responses[7])]
    assert ahead() == [(3, (4, 5)), (3, (6,)), (2, (7,)), (1, (6,))]
    batch.versions[1] = [2] * len(batch.responses[1])
    assert ahead() == [(3, (0, 2, 3, 4, 5)), (3, (6,)), (2, (1, 7)), (1, (6,))]
    assert batch.part([5, 6]).sampled_at(1).sum() == len(mixed) - 1
    assert batch.part([7]).sampled_at(2) is None
