"""Dynamic sampling: groups whose rewards are equal are replaced, within a bound, and the step keeps its size."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from qarl.batch.batch import build_batch
from qarl.config.rollout import DynamicSampling
from qarl.data.stream import PromptStream
from qarl.rewards import RewardResult
from qarl.rollout.engine import round_seed
from qarl.training.dynamic_sampling import Sampled, sample_until_full
from qarl.types import Prompt, Rollout

N = 2


def rollout(prompt: int, sample: int, reason: str = "stop") -> Rollout:
    return Rollout(prompt, sample, [1] * (sample + 1), [-0.5] * (sample + 1), reason, 0, 0, f"{prompt}/{sample}")


def sampler(varied: list[bool]):
    """Return `sample` for `sample_until_full`, and a list of its calls. varied: Per group, whether rewards differ."""
    left, asked = itertools.chain(varied, itertools.repeat(False)), []

    def sample(count: int, number: int) -> Sampled:
        first = sum(earlier for earlier, _ in asked)
        asked.append((count, number))
        prompts = [Prompt(first + i, [1], f"p{first + i}", {}) for i in range(count)]
        rewards = [reward for _ in prompts for reward in ((0.0, 1.0) if next(left) else (1.0, 1.0 + 2**-52))]
        rollouts = [rollout(prompt.id, sample) for prompt in prompts for sample in range(N)]
        scores = RewardResult(rewards, {"a": [None, *rewards[1:]]}, {"a": 1}, [f"round {number}"])
        return Sampled(prompts, rollouts, scores)

    return sample, asked


def test_groups_without_variance_are_replaced_until_the_step_is_full():
    sample, asked = sampler([True, False, False, True, False, True, True])
    found, metrics = sample_until_full(DynamicSampling(), 4, sample)
    assert asked == [(4, 0), (2, 1), (1, 2)]
    assert [prompt.id for prompt in found.prompts] == [0, 3, 5, 6]
    assert [(r.prompt_id, r.sample) for r in found.rollouts] == [(i, s) for i in (0, 3, 5, 6) for s in range(N)]
    assert found.scores.total == [0.0, 1.0] * 4
    assert found.scores.by_function == {"a": [None, 1.0, 0.0, 1.0, 0.0, 1.0, None, 1.0]}
    assert found.scores.failed == {"a": 3} and found.scores.messages == ["round 0", "round 1", "round 2"]
    assert metrics == {
        "sampling/rounds": 3.0,
        "sampling/groups": 7.0,
        "sampling/equal_frac": 3 / 7,
        "sampling/surplus_frac": 0.0,
        "sampling/short_frac": 0.0,
        "sampling/reward_mean": (4 * 1 + 3 * 2) / 14,
        "sampling/tokens": 7 * 3.0,
    }


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    varied=st.lists(st.booleans(), max_size=40),
    wanted=st.integers(1, 8),
    rounds=st.integers(1, 5),
    oversample=st.sampled_from([1.0, 1.5, 3.0]),
)
def test_a_step_always_has_its_size_and_never_more_rounds_than_the_bound(varied, wanted, rounds, oversample):
    sample, asked = sampler(varied)
    found, metrics = sample_until_full(DynamicSampling(max_rounds=rounds, oversample=oversample), wanted, sample)
    assert len(found.prompts) == wanted and len(found.rollouts) == len(found.scores.total) == wanted * N
    assert len(asked) == metrics["sampling/rounds"] <= rounds
    drawn = ([*varied, *[False] * 1000])[: sum(count for count, _ in asked)]
    good = [prompt.id for prompt in found.prompts if drawn[prompt.id]]
    assert good == [i for i, varies in enumerate(drawn) if varies][:wanted]
    assert metrics["sampling/short_frac"] == (wanted - len(good)) / wanted
    assert len(good) == wanted or len(asked) == rounds


def test_each_round_has_seeds_of_its_own_and_the_first_that_of_the_step():
    seeds = {round_seed(step, number) for step in range(50) for number in range(5)}
    assert len(seeds) == 250 and round_seed(7, 0) == 7 and all(0 <= seed < 2**63 for seed in seeds)


def test_truncated_responses_give_no_gradient_but_count_in_the_mean_of_their_group():
    rollouts = [rollout(0, 0), rollout(0, 1, "length"), rollout(0, 2), rollout(0, 3)]
    given_ = [Prompt(0, [1], "p", {})], rollouts, [1.0, 0.0, 0.0, 1.0], "grpo_no_std", 0
    assert build_batch(*given_).advantages.tolist() == [0.5, -0.5, -0.5, 0.5]
    assert build_batch(*given_, mask_truncated=True).advantages.tolist() == [0.5, 0.0, -0.5, 0.5]


def stream(bounds: tuple[float, float], shuffle: bool = False) -> PromptStream:
    return PromptStream([Prompt(i, [i], f"p{i}", {}) for i in range(4)], 0, shuffle, bounds)


def test_prompts_outside_the_pass_rates_are_skipped_from_their_second_use_on_also_after_a_resume():
    data = stream((0.4, 0.4))  # both included, up to rounding: (0.7 + 0.1) / 2 is 0.39999999999999997
    first = data.next(4)
    data.record_rewards(first, [0.0, 0.0, 0.7, 0.1, 1.0, 1.0, 0.4, 0.4])
    again = stream((0.4, 0.4))
    again.load_state(data.state())
    for one in (data, again):
        assert [prompt.id for prompt in one.next(5)] == [1, 3, 1, 3, 1]
    assert data.state() == again.state()


def test_a_filter_that_leaves_nothing_gives_every_prompt():
    data = stream((0.5, 0.6), shuffle=True)
    data.record_rewards(data.next(4), [0.0] * 4)
    assert [{prompt.id for prompt in data.next(4)} for _ in range(3)] == [{0, 1, 2, 3}] * 3
