"""The native engine on a GPU: decodes as CUDA graphs, ahead of the host, with the learner's bits."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from qarl_formats.registry import make_scheme
from qarl_kernels.logprob import Truncation

from qarl.config import ModelConfig, QuantConfig, RolloutConfig
from qarl.policy.load import load_model, load_tokenizer
from qarl.policy.policy import Policy
from qarl.rollout.engine import SamplingParams
from qarl.rollout.native.async_runner import AsyncRunner
from qarl.rollout.native.engine import NativeEngine
from qarl.types import Prompt, Rollout

SCHEMES = [
    ("bf16", {}),
    ("w8a8", {}),
    ("fp8", {}),
    ("fp8_block", {}),
    ("nvfp4a16", {}),
    ("w4a16", {"group_size": 32}),
    ("w4a16", {"group_size": 32, "symmetric": False}),
    ("w4a8", {"group_size": 32}),
    ("w4a16", {"group_size": 32, "kv_cache_dtype": "fp8"}),
]
TRUNCATIONS = [
    Truncation(0.0),
    Truncation(0.7),
    Truncation(min_p=0.1),
    Truncation(top_k=5),
    Truncation(1.2, top_p=0.8),
    Truncation(0.9, 40, 0.9, 0.02),
]
PROMPTS = [
    Prompt(10 + i, [3 + (31 * i + 7 * j) % 256 for j in range(n)], "", {}) for i, n in enumerate([7, 64, 1, 130])
]
SAMPLING = SamplingParams(3, 3, 24, stop_token_ids=frozenset({1, 40, 90}))


@pytest.fixture(scope="module")
def make_policy(tiny_model) -> Callable[..., Policy]:
    """make_policy(scheme, family, **quant); made once for all tests, not to be trained."""
    made: dict[str, Policy] = {}

    def make(scheme: str = "bf16", family: str = "qwen3", dtype: torch.dtype = torch.bfloat16, **quant) -> Policy:
        key = repr((scheme, family, dtype, sorted(quant.items())))
        if key not in made:
            if scheme.startswith("fp8") and torch.cuda.get_device_capability() < (8, 9):
                pytest.skip("fp8 kernels need compute capability 8.9")
            config = QuantConfig(scheme=scheme, **quant)
            model = load_model(ModelConfig(path=str(tiny_model(family, max_position_embeddings=4096))))
            form = make_scheme(scheme, config.group_size, config.symmetric, config.grid, config.scale_dtype)
            made[key] = Policy(model, form, config, dtype, torch.device("cuda", 0))
        return made[key]

    return make


@pytest.fixture
def make_engine(tiny_model) -> Iterator[Callable[..., NativeEngine]]:
    """make_engine(policy, graphs=True, **rollout) -> an engine with the policy's current snapshot published."""
    tokenizer = load_tokenizer(ModelConfig(path=str(tiny_model())))
    made: list[NativeEngine] = []

    def make(policy: Policy, graphs: bool = True, **rollout) -> NativeEngine:
        engine = NativeEngine(policy.sampler, tokenizer, RolloutConfig(**rollout), graphs)
        engine.publish(policy.current)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


def assert_exact(
    policy: Policy,
    rollouts: list[Rollout],
    prompts: list[Prompt] = PROMPTS,
    truncation: Truncation = Truncation(),  # noqa: B008
) -> None:
    """The reported log-probs are the learner's, bit for bit."""
    n = len(rollouts) // len(prompts)
    by_response = [p.token_ids for p in prompts for _ in range(n)]
    with torch.no_grad():
        learned = policy.logprobs(by_response, [r.token_ids for r in rollouts], truncation, 128)[0].cpu()
    assert torch.equal(learned, torch.tensor([value for r in rollouts for value in r.logprobs]))


def graphs_of(engine: NativeEngine) -> int:
    """How many graphs it has captured."""
    assert isinstance(engine._runner, AsyncRunner) and engine._runner._graphs is not None
    return sum(replay is not None for replay in engine._runner._graphs._replays.values())


@pytest.mark.parametrize(("scheme", "quant"), SCHEMES, ids=lambda value: str(value))
def test_graphs_draw_what_single_launches_draw_with_the_learners_logprobs(
    make_policy, make_engine, scheme: str, quant: dict
) -> None:
    """Sequences join and leave, prefills are cut into chunks, and pages run out."""
    policy = make_policy(scheme, **quant)
    engine = make_engine(policy)
    rollouts = engine.generate(PROMPTS, SAMPLING, 0)
    assert graphs_of(engine) > 0
    assert_exact(policy, rollouts)
    assert engine.generate(PROMPTS, SAMPLING, 0) == rollouts
    assert make_engine(policy, graphs=False).generate(PROMPTS, SAMPLING, 0) == rollouts
    few = make_engine(policy, max_num_seqs=5, max_batched_tokens=33)
    assert few.generate(PROMPTS, SAMPLING, 0) == rollouts


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_fp8_kv_cache_takes_half_the_memory_and_is_exact(make_policy, make_engine, family: str, dtype) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("e4m3 needs compute capability 8.9")
    held, drawn = {}, {}
    for cache in ("auto", "fp8"):
        policy = make_policy("w8a8", family, dtype, kv_cache_dtype=cache)
        engine = make_engine(policy, kv_cache_tokens=4096)
        before = torch.cuda.memory_allocated()
        engine._kv_cache(256, 16)
        held[cache] = torch.cuda.memory_allocated() - before
        drawn[cache] = engine.generate(PROMPTS, SAMPLING, 0)
        assert_exact(policy, drawn[cache])
    assert held["auto"] == 2 * held["fp8"] > 0
    assert drawn["auto"] != drawn["fp8"]


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_every_truncation_is_exact(make_policy, make_engine, truncation: Truncation) -> None:
    policy = make_policy("w4a16", group_size=32)
    sampling = SamplingParams(2, 5, 16, truncation)
    rollouts = make_engine(policy).generate(PROMPTS, sampling, 0)
    assert_exact(policy, rollouts, truncation=truncation)
    assert make_engine(policy, graphs=False, max_num_seqs=3).generate(PROMPTS, sampling, 0) == rollouts


def test_preempted_sequences_are_exact(make_policy, make_engine) -> None:
    policy = make_policy("fp8")
    prompts = [Prompt(i, [3 + (i * 31 + j) % 256 for j in range(50)], "", {}) for i in range(6)]
    sampling = SamplingParams(2, 5, 80)
    roomy, tight = make_engine(policy), make_engine(policy, kv_cache_tokens=384)
    rollouts = tight.generate(prompts, sampling, 0)
    assert tight.preemptions > 0
    assert roomy.generate(prompts, sampling, 0) == rollouts
    assert_exact(policy, rollouts, prompts)


def test_contexts_of_several_chunks_are_exact(make_policy, make_engine) -> None:
    """Lengths pass a chunk of attention while they are decoded, so that another graph takes over."""
    policy = make_policy()
    prompts = [
        Prompt(i, [3 + (i * 31 + 7 * j) % 256 for j in range(n)], "", {}) for i, n in enumerate([1000, 30, 2040])
    ]
    engine = make_engine(policy, max_batched_tokens=700)
    rollouts = engine.generate(prompts, SamplingParams(2, 1, 60), 0)
    assert_exact(policy, rollouts, prompts)
    assert make_engine(policy, graphs=False).generate(prompts, SamplingParams(2, 1, 60), 0) == rollouts


def test_a_second_generation_waits_for_nothing_but_tokens(make_policy, make_engine) -> None:
    engine = make_engine(make_policy("w4a16", group_size=32))
    expected = engine.generate(PROMPTS, SAMPLING, 0)
    engine.generate(PROMPTS, SAMPLING, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert engine.generate(PROMPTS, SAMPLING, 0) == expected
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_published_version_is_what_is_drawn_from(tiny_model, make_engine) -> None:
    config = QuantConfig(scheme="w4a16", group_size=32)
    model = load_model(ModelConfig(path=str(tiny_model("llama"))))
    policy = Policy(model, make_scheme("w4a16", 32), config, torch.bfloat16, torch.device("cuda", 0))
    engine = make_engine(policy)
    before = engine.generate(PROMPTS, SAMPLING, 0)
    for version in (1, 2, 3):
        with torch.no_grad():
            for _, master in policy.named_parameters():
                master.mul_(1.05)
        policy.refresh(version)
        engine.publish(policy.current)
        found = engine.generate(PROMPTS, SAMPLING, version)
        assert_exact(policy, found)
        assert [r.token_ids for r in found] != [r.token_ids for r in before]
        assert make_engine(policy, graphs=False).generate(PROMPTS, SAMPLING, version) == found
        before = found


def test_sleep_gives_all_memory_back_and_changes_nothing(make_policy, make_engine) -> None:
    engine = make_engine(make_policy())
    expected = engine.generate(PROMPTS, SAMPLING, 0)
    gc.collect()  # or policies of other tests, which are circles, go in the middle
    left = []
    for _ in range(4):
        engine.sleep()
        torch.cuda.synchronize()
        left.append(torch.cuda.memory_allocated())
        torch.cuda.empty_cache()
        left.append(torch.cuda.memory_reserved())
        engine.wake()
        assert engine.generate(PROMPTS, SAMPLING, 0) == expected
    assert len(set(left[0::2])) == 1 and len(set(left[1::2])) == 1, left
