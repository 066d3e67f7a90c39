"""Asynchronous steps on a `HashingSampler`: device inputs, tokens that are read a step later, and CUDA graphs.

Without a GPU a "graph" repeats the Python code of its first step, so it ignores inputs that are not in the buffers.
"""

import random
from collections.abc import Callable

import pytest
import torch
from hashing_sampler import VOCABULARY, HashingSampler, choices, expected
from kernel_oracles import draw_reference
from qarl_kernels.logprob import Truncation

from qarl.config import RolloutConfig
from qarl.policy.routes import ExpertLayer
from qarl.rollout.engine import SamplingParams
from qarl.rollout.native.engine import NativeEngine
from qarl.types import Prompt
from qarl.utils.expert_names import EXPERT_NAMES


@pytest.fixture(autouse=True)
def _draws_in_torch(monkeypatch) -> None:
    monkeypatch.setattr("qarl_kernels.draw.draw", draw_reference)


@pytest.fixture
def make(tokenizer) -> Callable[..., NativeEngine]:
    def engine(graphs: bool = True, **rollout) -> NativeEngine:
        made = NativeEngine(HashingSampler(), tokenizer, RolloutConfig(**rollout), graphs)
        made.version = 0
        return made

    return engine


def random_prompts(rng: random.Random, count: int, longest: int) -> list[Prompt]:
    lengths = [rng.choice([1, 63, 64, 65, rng.randint(1, longest)]) for _ in range(count)]
    return [Prompt(i, [rng.randrange(VOCABULARY) for _ in range(n)], "", {}) for i, n in enumerate(lengths)]


def with_experts(engine: NativeEngine, count: int) -> NativeEngine:
    """Give the engine's model two layers of `count` experts, three per token, and return the engine."""
    engine.sampler.experts = tuple(ExpertLayer(i, "", count, 3, True, EXPERT_NAMES["mixtral"]) for i in range(2))
    return engine


def check(engine: NativeEngine, prompts: list[Prompt], sampling: SamplingParams) -> None:
    found = engine.generate(prompts, sampling, 0)
    assert [(r.prompt_id, r.sample) for r in found] == [(p.id, i) for p in prompts for i in range(sampling.n)]
    for rollout, prompt in zip(found, [p for p in prompts for _ in range(sampling.n)], strict=True):
        tokens, logprobs = expected(prompt, rollout.sample, sampling)
        assert (rollout.token_ids, rollout.logprobs) == (tokens, logprobs)
        assert rollout.finish_reason == ("stop" if tokens[-1] in sampling.stop_token_ids else "length")
        if not sampling.record_routing:
            assert rollout.routing is None
            continue
        ran = (prompt.token_ids + tokens)[:-1]
        layers = engine.sampler.experts
        wanted = [[choices(ran[: end + 1], layer) for layer in layers] for end in range(len(ran))]
        assert rollout.routing.dtype == (torch.uint8 if layers[0].count < 256 else torch.int16)
        assert rollout.routing.tolist() == wanted


@pytest.mark.parametrize("seed", range(3))
def test_random_batches_sample_what_each_response_samples_alone(make, seed: int) -> None:
    rng = random.Random(seed)
    prompts = random_prompts(rng, rng.randint(1, 6), 150)
    length, n = rng.choice([1, 2, 20, 90]), rng.randint(1, 4)
    longest = max(len(p.token_ids) for p in prompts) + length
    engine = make(
        max_num_seqs=rng.choice([1, 3, 5, 64]),
        max_batched_tokens=rng.choice([1, 7, 64, 512]),
        kv_cache_tokens=rng.choice([None, 64 * (-(-longest // 64) + rng.choice([0, 1, 3]))]),
        graphs=rng.random() < 0.8,
    )
    stops = frozenset(rng.sample(range(VOCABULARY), rng.choice([0, 1, 4])))
    for run in range(2):  # the second one finds graphs
        check(engine, prompts, SamplingParams(n, seed + run, length, Truncation(), (), stops))
    with_experts(engine, rng.choice([8, 255, 300]))  # and what their tokens went through is there, whoever ran them
    for run in range(2):
        check(engine, prompts, SamplingParams(n, seed + run, length, Truncation(), (), stops, record_routing=True))


@pytest.mark.parametrize(
    "truncation", [Truncation(0.0), Truncation(0.7, top_k=9, min_p=0.1), Truncation(1.3, top_p=0.5)], ids=str
)
def test_every_truncation_draws_from_its_distribution(make, truncation: Truncation) -> None:
    engine = make(max_num_seqs=5)
    check(engine, random_prompts(random.Random(1), 4, 70), SamplingParams(3, 5, 12, truncation))


def test_preempted_responses_come_back_and_the_ended_ones_do_not(make) -> None:
    prompts = [Prompt(i, [(i + j) % VOCABULARY for j in range(50)], "", {}) for i in range(6)]
    engine = make(kv_cache_tokens=192)
    with_experts(engine, 8)
    check(engine, prompts, SamplingParams(2, 4, 40, Truncation(), (), frozenset({9}), record_routing=True))
    assert engine.preemptions > 0


def test_a_response_that_stops_costs_one_token_more_and_none_at_the_limit(make) -> None:
    engine, prompt = make(), Prompt(0, [5, 6], "", {})
    tokens, _ = expected(prompt, 0, SamplingParams(1, 0, 30))
    place = next(i for i, token in enumerate(tokens) if i > 3 and token not in tokens[:i])
    for stops, forwards in ((frozenset({tokens[place]}), place + 2), (frozenset(), 30)):
        engine.sampler.steps.clear()
        check(engine, [prompt], SamplingParams(1, 0, 30, Truncation(), (), stops))
        assert len(engine.sampler.steps) == forwards


def test_graphs_are_dropped_by_a_publish_sleep_and_another_truncation(make) -> None:
    engine, prompts = make(), random_prompts(random.Random(2), 3, 60)
    check(engine, prompts, SamplingParams(2, 0, 6))
    first = engine._runner
    check(engine, prompts[:2], SamplingParams(2, 1, 5))
    assert engine._runner is first
    check(engine, prompts, SamplingParams(2, 0, 6, Truncation(0.5)))
    second = engine._runner
    assert second is not first
    engine.sampler.install(None)  # other operands
    check(engine, prompts, SamplingParams(2, 0, 6, Truncation(0.5)))
    assert engine._runner is not second
    engine.sleep()
    assert engine._runner is None and engine._cache is None
    check(engine, prompts, SamplingParams(2, 0, 6))
