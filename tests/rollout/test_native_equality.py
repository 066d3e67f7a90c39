"""The sampler's log-probs are the learner's, bit for bit, and a response is its own: whatever shares its batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from qarl_kernels.logprob import Truncation

from qarl.policy.policy import Policy
from qarl.rollout.engine import SamplingParams
from qarl.types import Prompt, Rollout

SCHEMES = {
    "bf16": {"scheme": "bf16"},
    "w4a16": {"scheme": "w4a16"},
    "w4a16-asymmetric": {"scheme": "w4a16", "symmetric": False},
    "w8a8": {"scheme": "w8a8"},
    "fp8": {"scheme": "fp8"},
    "w4a8": {"scheme": "w4a8"},
    "fp8_block": {"scheme": "fp8_block"},
    "nvfp4a16": {"scheme": "nvfp4a16"},
    "fp8 KV cache": {"scheme": "w4a16", "kv_cache_dtype": "fp8"},
}
LAYOUTS = {
    "one token a step": {"max_batched_tokens": 1},
    "seven tokens a step": {"max_batched_tokens": 7, "max_num_seqs": 3},
    "64 tokens a step": {"max_batched_tokens": 64},
    "one sequence at a time": {"max_num_seqs": 1},
    "few pages": {"kv_cache_tokens": 256, "max_batched_tokens": 64},
}
TRUNCATIONS = [
    Truncation(temperature=0.7),
    Truncation(temperature=1.5, top_p=0.8),
    Truncation(top_k=5),
    Truncation(min_p=0.1),
    Truncation(0.9, 40, 0.9, 0.02),
]
SAMPLING = SamplingParams(n=2, seed=3, max_response_length=8, stop_token_ids=frozenset({1}))


def learner_logprobs(
    policy: Policy,
    prompts: list[Prompt],
    rollouts: list[Rollout],
    truncation: Truncation = SAMPLING.truncation,
    chunk: int = 128,
) -> torch.Tensor:
    n = len(rollouts) // len(prompts)
    by_response = [p.token_ids for p in prompts for _ in range(n)]
    with torch.no_grad():
        return policy.logprobs(by_response, [r.token_ids for r in rollouts], truncation, chunk)[0]


def sampler_logprobs(rollouts: list[Rollout]) -> torch.Tensor:
    return torch.tensor([value for r in rollouts for value in r.logprobs])


@pytest.fixture(params=[1, 2])
def threads(request) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_sampler_and_learner_logprobs_are_equal(make_policy, make_engine, prompts, family: str, scheme: str):
    policy = make_policy(family, **SCHEMES[scheme])
    engine = make_engine(policy, max_batched_tokens=50, max_num_seqs=5)
    rollouts = engine.generate(prompts, SAMPLING, 0)
    assert torch.equal(learner_logprobs(policy, prompts, rollouts), sampler_logprobs(rollouts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_logprobs_are_equal_in_other_compute_dtypes(make_policy, make_engine, prompts, dtype: torch.dtype):
    policy = make_policy(dtype=dtype)
    rollouts = make_engine(policy, max_batched_tokens=50).generate(prompts, SAMPLING, 0)
    assert torch.equal(learner_logprobs(policy, prompts, rollouts), sampler_logprobs(rollouts))


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "fp8", "fp8_block", "nvfp4a16"])
def test_logprobs_are_equal_with_this_many_threads(make_policy, make_engine, prompts, threads: int, scheme: str):
    policy = make_policy("qwen3", **SCHEMES[scheme])
    rollouts = make_engine(policy, max_batched_tokens=50).generate(prompts, SAMPLING, 0)
    assert torch.equal(learner_logprobs(policy, prompts, rollouts), sampler_logprobs(rollouts))


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("chunk", [3, 128])
def test_logprobs_are_equal_under_truncation(make_policy, make_engine, prompts, truncation: Truncation, chunk: int):
    policy = make_policy()
    sampling = SamplingParams(n=2, seed=3, max_response_length=8, truncation=truncation)
    rollouts = make_engine(policy).generate(prompts, sampling, 0)
    assert torch.equal(learner_logprobs(policy, prompts, rollouts, truncation, chunk), sampler_logprobs(rollouts))


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("length", [1, 40, 64, 70, 128])
def test_forks_draw_from_the_learners_distribution(make_policy, make_engine, n: int, length: int):
    prompt = [Prompt(0, [3 + i * 7 % 256 for i in range(length)], "", {})]
    sampling = SamplingParams(n=n, seed=1, max_response_length=30)
    rollouts = make_engine().generate(prompt, sampling, 0)
    assert len({tuple(r.token_ids) for r in rollouts}) == n
    assert torch.equal(learner_logprobs(make_policy(), prompt, rollouts), sampler_logprobs(rollouts))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("family", "scheme"),
    [("llama", "w4a16"), ("qwen3", "w8a8"), ("qwen2", "fp8_block"), ("llama", "nvfp4a16")],
)
def test_responses_do_not_depend_on_how_steps_are_cut(
    make_policy, make_engine, prompts, layout: str, family: str, scheme: str
):
    policy = make_policy(family, **SCHEMES[scheme])
    expected = make_engine(policy).generate(prompts, SAMPLING, 0)
    assert make_engine(policy, **LAYOUTS[layout]).generate(prompts, SAMPLING, 0) == expected


def test_responses_do_not_depend_on_preemption(make_engine):
    prompts = [Prompt(i, [3 + (i * 31 + j) % 256 for j in range(50)], "", {}) for i in range(4)]
    sampling = SamplingParams(n=2, seed=5, max_response_length=80)
    roomy, tight = make_engine(), make_engine(kv_cache_tokens=384)
    expected, found = roomy.generate(prompts, sampling, 0), tight.generate(prompts, sampling, 0)
    assert (roomy.preemptions, tight.preemptions > 0) == (0, True)
    assert found == expected


def test_logprobs_are_equal_after_preemption(make_policy, make_engine):
    prompts = [Prompt(i, [3 + (i * 31 + j) % 256 for j in range(60)], "", {}) for i in range(4)]
    policy = make_policy("qwen2", "fp8")
    engine = make_engine(policy, kv_cache_tokens=256, max_batched_tokens=20)
    rollouts = engine.generate(prompts, SamplingParams(n=2, seed=5, max_response_length=70), 0)
    assert engine.preemptions > 0
    assert torch.equal(learner_logprobs(policy, prompts, rollouts), sampler_logprobs(rollouts))


def test_responses_do_not_depend_on_the_other_prompts(make_engine, prompts):
    engine = make_engine()
    together = engine.generate(prompts, SAMPLING, 0)
    alone = [r for prompt in prompts for r in engine.generate([prompt], SAMPLING, 0)]
    assert alone == together


def test_responses_do_not_depend_on_the_order_of_prompts(make_engine, prompts):
    engine = make_engine(max_num_seqs=5)
    forward, backward = engine.generate(prompts, SAMPLING, 0), engine.generate(prompts[::-1], SAMPLING, 0)
    assert sorted(backward, key=lambda r: (r.prompt_id, r.sample)) == forward


def test_the_first_samples_do_not_depend_on_how_many_there_are(make_engine, prompts):
    engine = make_engine()
    few, many = (engine.generate(prompts[:1], SamplingParams(n, 3, 8), 0) for n in (2, 6))
    assert many[:2] == few


def test_what_a_page_held_before_does_not_matter(make_engine, prompts):
    """Attention multiplies values behind a sequence's end by zero, and zero times NaN is NaN."""
    engine = make_engine()
    expected = engine.generate(prompts, SAMPLING, 0)
    for keys, values in engine._cache.layers:
        keys.fill_(float("nan"))
        values.fill_(float("nan"))
    assert engine.generate(prompts, SAMPLING, 0) == expected


@pytest.mark.parametrize(
    ("scheme", "learner"),
    [("w8a8", "fake_quant"), ("fp8", "fake_quant"), ("w8a8", "full_precision"), ("w4a16", "full_precision")],
)
def test_a_learner_of_other_arithmetic_shows_its_mismatch(make_policy, make_engine, prompts, scheme: str, learner: str):
    policy = make_policy("llama", scheme, learner=learner)
    rollouts = make_engine(policy).generate(prompts, SAMPLING, 0)
    assert not torch.equal(learner_logprobs(policy, prompts, rollouts), sampler_logprobs(rollouts))


def test_a_full_precision_learners_sampler_is_the_aligned_one(make_policy, make_engine, prompts):
    sampled = [
        make_engine(make_policy("llama", "w4a16", learner=learner)).generate(prompts, SAMPLING, 0)
        for learner in ("full_precision", "fake_quant", "aligned")
    ]
    assert sampled[0] == sampled[1] == sampled[2]
