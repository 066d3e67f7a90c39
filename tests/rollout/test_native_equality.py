"""The sampler's log-probs are the learner's, bit for bit, and a response does not depend on its batch."""

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
LAYOUTS = [
    {"max_batched_tokens": 7, "max_num_seqs": 3},
    {"max_num_seqs": 1},
    {"kv_cache_tokens": 256, "max_batched_tokens": 64},
]
TRUNCATIONS = [Truncation(temperature=0.7), Truncation(0.9, 40, 0.9, 0.02)]
SAMPLING = SamplingParams(n=2, seed=3, max_response_length=8, stop_token_ids=frozenset({1}))


def equal(
    policy: Policy,
    prompts: list[Prompt],
    rollouts: list[Rollout],
    truncation: Truncation = SAMPLING.truncation,
    chunk: int = 128,
) -> bool:
    """Whether the learner's log-probs of all tokens have the bits of the sampler's."""
    n = len(rollouts) // len(prompts)
    by_response = [p.token_ids for p in prompts for _ in range(n)]
    with torch.no_grad():
        learned = policy.logprobs(by_response, [r.token_ids for r in rollouts], truncation, chunk)[0]
    return torch.equal(learned.cpu(), torch.tensor([value for r in rollouts for value in r.logprobs]))


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# qwen2 has biases, qwen3 norms of q and k.
CASES = [*(("qwen2", scheme, 1) for scheme in SCHEMES), ("qwen3", "w4a16", 2), ("qwen3", "w8a8", 2)]


@pytest.mark.parametrize(("family", "scheme", "threads"), CASES)
def test_sampler_and_learner_logprobs_are_equal(
    make_policy, make_engine, prompts, family: str, scheme: str, threads: int
):
    torch.set_num_threads(threads)
    policy = make_policy(family, **SCHEMES[scheme])
    rollouts = make_engine(policy, max_batched_tokens=50, max_num_seqs=5).generate(prompts, SAMPLING, 0)
    assert equal(policy, prompts, rollouts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_logprobs_are_equal_in_other_compute_dtypes(make_policy, make_engine, prompts, dtype: torch.dtype):
    policy = make_policy(dtype=dtype)
    assert equal(policy, prompts, make_engine(policy, max_batched_tokens=50).generate(prompts, SAMPLING, 0))


def test_logprobs_of_triton_kernels_are_equal(make_fused, make_engine):
    """Steps that run ahead of the host: decodes that cross into a second page, and a prefill beside a decode.

    `test_native_steps.py` tests the inputs of these steps; this test, the bits of their results.
    """
    policy = make_fused("qwen3")
    prompts = [Prompt(i, [3 + (31 * i + 7 * j) % 256 for j in range(n)], "", {}) for i, n in enumerate([63, 2])]
    rollouts = make_engine(policy, max_batched_tokens=63).generate(prompts, SamplingParams(1, 3, 4), 0)
    assert equal(policy, prompts, rollouts, Truncation())


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_logprobs_are_equal_under_truncation(make_policy, make_engine, prompts, truncation: Truncation):
    policy = make_policy()
    sampling = SamplingParams(n=2, seed=3, max_response_length=8, truncation=truncation)
    rollouts = make_engine(policy).generate(prompts, sampling, 0)
    assert all(equal(policy, prompts, rollouts, truncation, chunk) for chunk in (3, 128))


@pytest.mark.parametrize(("length", "n"), [(1, 5), (64, 5), (70, 5)])
def test_forks_draw_from_the_learners_distribution(make_policy, make_engine, length: int, n: int):
    prompt = [Prompt(0, [3 + i * 7 % 256 for i in range(length)], "", {})]
    rollouts = make_engine().generate(prompt, SamplingParams(n=n, seed=1, max_response_length=30), 0)
    assert len({tuple(r.token_ids) for r in rollouts}) == n
    assert equal(make_policy(), prompt, rollouts)


def test_responses_do_not_depend_on_how_steps_are_cut(make_policy, make_engine, prompts):
    policy = make_policy("qwen2", "w8a8")
    expected = make_engine(policy).generate(prompts, SAMPLING, 0)
    for layout in LAYOUTS:
        assert make_engine(policy, **layout).generate(prompts, SAMPLING, 0) == expected, layout


def test_responses_do_not_depend_on_preemption_and_logprobs_stay_equal(make_policy, make_engine):
    prompts = [Prompt(i, [3 + (i * 31 + j) % 256 for j in range(60)], "", {}) for i in range(3)]
    policy, sampling = make_policy("qwen2", "fp8"), SamplingParams(n=2, seed=5, max_response_length=10)
    roomy, tight = make_engine(policy), make_engine(policy, kv_cache_tokens=256, max_batched_tokens=64)
    expected, found = roomy.generate(prompts, sampling, 0), tight.generate(prompts, sampling, 0)
    assert (roomy.preemptions, tight.preemptions > 0) == (0, True)
    assert found == expected and equal(policy, prompts, found)


def test_responses_do_not_depend_on_the_other_prompts_their_order_or_the_number_of_samples(make_engine, prompts):
    engine = make_engine(max_num_seqs=5)
    together, backward = engine.generate(prompts, SAMPLING, 0), engine.generate(prompts[::-1], SAMPLING, 0)
    assert [r for prompt in prompts for r in engine.generate([prompt], SAMPLING, 0)] == together
    assert sorted(backward, key=lambda r: (r.prompt_id, r.sample)) == together
    assert (
        engine.generate(prompts[:1], SamplingParams(6, 3, 8, stop_token_ids=SAMPLING.stop_token_ids), 0)[:2]
        == together[:2]
    )


def test_what_a_page_held_before_does_not_matter(make_engine, prompts):
    """Attention multiplies values behind a sequence's end by zero, and zero times NaN is NaN."""
    engine = make_engine()
    expected = engine.generate(prompts, SAMPLING, 0)
    for keys, values in engine._cache.layers:
        keys.fill_(float("nan"))
        values.fill_(float("nan"))
    assert engine.generate(prompts, SAMPLING, 0) == expected


def test_a_learner_of_other_arithmetic_shows_its_mismatch(make_policy, make_engine, prompts):
    policy = make_policy("llama", "w4a16", learner="full_precision")
    rollouts = make_engine(policy).generate(prompts, SAMPLING, 0)
    assert not equal(policy, prompts, rollouts)
