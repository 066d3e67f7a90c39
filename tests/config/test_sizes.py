"""Sizes that are null: constants on a CPU; on a GPU they depend on its memory and the model."""

import pytest
from plain_settings import plain_config

from qarl.config import Config, RolloutConfig
from qarl.config.architecture import Architecture
from qarl.memory import estimate as memory
from qarl.memory.sizes import (
    ENOUGH_TOKENS,
    FEWEST_SEQUENCES,
    LOGITS_SHARE,
    MICRO_BATCH_TOKENS,
    RECOMPUTE,
    UPDATE_SHARE,
    decide_sizes,
    decided,
    keep_sizes,
    sampler_sizes,
)
from qarl.utils import machine

GIB = 2**30
SMALL = Architecture("llama", 576, 1536, 30, 9, 3, 64, 49_152, 8192, tied_embeddings=True)
MIDDLE = Architecture("qwen3", 1024, 3072, 28, 16, 8, 128, 49_152, 40_960, tied_embeddings=True)
LARGE = Architecture("qwen3", 4096, 12_288, 36, 32, 8, 128, 151_936, 40_960, tied_embeddings=False)


def config(**sections) -> Config:
    return plain_config(
        data={"max_prompt_length": 512},
        rollout={"max_response_length": 1024} | sections.pop("rollout", {}),
        train={"prompts_per_step": 64} | sections.pop("train", {}),
        **sections,
    )


def numbers(config: Config) -> tuple[int, int, int, int]:
    rollout, train = config.rollout, config.train
    return rollout.max_num_seqs, rollout.max_batched_tokens, train.micro_batch_tokens, train.logprob_chunk


def micro_batch(config: Config) -> tuple[int, str]:
    return config.train.micro_batch_tokens, config.train.recompute


def decided_for(gib: int, architecture: Architecture = SMALL, **sections) -> tuple[int, str]:
    return micro_batch(decide_sizes(config(**sections), "cuda", architecture, gib * GIB))


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_the_sizes_of_a_cpu_are_constants(engine):
    found = decide_sizes(config(rollout={"engine": engine}), "cpu")
    assert numbers(found) == (64, 512, 4096, 128) and found.train.recompute == "elementwise"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_given_stands(device):
    given = config(
        rollout={"max_num_seqs": 3, "max_batched_tokens": 5},
        train={"micro_batch_tokens": 7, "logprob_chunk": 9, "recompute": "mlp"},
    )
    assert decide_sizes(given, device, LARGE, 80 * GIB) == given


@pytest.mark.parametrize(("kernels", "most"), [("auto", 128), ("reference", 64)])
def test_an_fp8_kv_cache_holds_more_sequences_if_kernels_read_it(kernels, most):
    auto, fp8 = (config(quant={"kv_cache_dtype": cache, "kernels": kernels}) for cache in ("auto", "fp8"))
    found = [decide_sizes(one, "cuda", LARGE, 80 * GIB).rollout.max_num_seqs for one in (auto, fp8)]
    assert found == [64, most]


def test_a_large_gpu_does_more_at_once_and_an_unknown_gpu_or_model_gets_the_smallest_sizes():
    assert numbers(decide_sizes(config(), "cuda", SMALL, 80 * GIB)) == (512, 4096, 65536, 4096)
    assert decided_for(80) == (65536, "elementwise")
    assert decided_for(80, MIDDLE) == (16384, "elementwise")
    assert numbers(decide_sizes(config(rollout={"engine": "vllm"}), "cuda", SMALL, 80 * GIB))[:2] == (256, 8192)
    for architecture, size in ((None, 80 * GIB), (SMALL, None), (None, None)):
        found = decide_sizes(config(), "cuda", architecture, size)
        assert numbers(found) == (FEWEST_SEQUENCES, 4096, 4096, 512) and found.train.recompute == "layer"


def held(config: Config, architecture: Architecture, tokens: int, recompute: str) -> int:
    train = config.train.model_copy(update={"micro_batch_tokens": tokens, "recompute": recompute})
    items = memory.estimate(config.model_copy(update={"train": train}), architecture, "cuda")
    return memory.phase_bytes(items, "update")


@pytest.mark.parametrize("gib", [10, 16, 24, 80])
@pytest.mark.parametrize("architecture", [SMALL, LARGE], ids=["small", "large"])
def test_no_faster_choice_fits(architecture, gib):
    found = decide_sizes(config(optim={"offload": True}), "cuda", architecture, gib * GIB)
    tokens, recompute = micro_batch(found)
    room = UPDATE_SHARE * gib * GIB
    assert held(found, architecture, tokens, recompute) <= room or (tokens, recompute) == (1024, "layer")
    better = [(n, mode) for mode in RECOMPUTE[: RECOMPUTE.index(recompute)] for n in (16384, ENOUGH_TOKENS)]
    better += [(n, recompute) for n in MICRO_BATCH_TOKENS if n > tokens]
    assert all(held(found, architecture, *one) > room for one in better)


def test_a_micro_batch_is_no_larger_than_a_step_and_chunks_of_logits_depend_on_the_vocabulary():
    small = config(train={"prompts_per_step": 1}, rollout={"n": 2, "max_response_length": 512})
    assert decide_sizes(small, "cuda", SMALL, 140 * GIB).train.micro_batch_tokens == 2048  # 2 sequences of 1024
    for architecture in (SMALL, LARGE):
        rows = decide_sizes(config(), "cuda", architecture, 80 * GIB).train.logprob_chunk
        assert 2 * 4 * rows * architecture.vocab_size <= LOGITS_SHARE * 80 * GIB
    assert rows == 2048
    ranked = decide_sizes(config(rollout={"top_p": 0.9}), "cuda", LARGE, 80 * GIB).train.logprob_chunk
    assert ranked == 256  # a sort takes five times as much


@pytest.mark.parametrize("given", [{"max_num_seqs": 10_000}, {"max_batched_tokens": 8}])
def test_vllm_gets_a_token_per_sequence(given):
    found = sampler_sizes(config(rollout={"engine": "vllm", **given}).rollout, "cuda")
    assert found.max_batched_tokens >= found.max_num_seqs
    assert given.items() <= found.model_dump().items()


def test_a_resumed_run_keeps_its_sizes_on_another_device_and_each_decision_is_a_line():
    begun = decide_sizes(config(), "cpu")
    assert decide_sizes(keep_sizes(config(), begun), "cuda", SMALL, 80 * GIB) == begun
    given = config(rollout={"max_num_seqs": 3})
    assert keep_sizes(given, begun).rollout.max_num_seqs == 3  # which the run directory then refuses
    assert list(decided(given, decide_sizes(given, "cpu"), "cpu")) == [
        "rollout.max_batched_tokens: null -> 512 (cpu)",
        "train.micro_batch_tokens: null -> 4096 (cpu)",
        "train.logprob_chunk: null -> 128 (cpu)",
        "train.recompute: null -> elementwise (cpu)",
    ]


class FakeDriver:
    """libnvidia-ml.so.1 as far as qarl calls it, with GPUs of 80 GiB."""

    def __init__(self, fail: str = "", count: int = 1) -> None:
        self.calls, self.fail, self.count = [], fail, count

    def __getattr__(self, name: str):
        def call(*arguments) -> int:
            self.calls.append((name, arguments))
            if name == "nvmlDeviceGetMemoryInfo":
                arguments[1]._obj.total = 80 * GIB
            if name == "nvmlDeviceGetCount_v2":
                arguments[0]._obj.value = self.count
            return int(name == self.fail)

        return call


def test_a_gpus_memory_is_read_from_the_driver(monkeypatch):
    driver = FakeDriver()
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert machine.gpu_bytes() == 80 * GIB
    assert driver.calls[1][0] == "nvmlDeviceGetHandleByIndex_v2" and driver.calls[1][1][0].value == 3
    assert driver.calls[-1][0] == "nvmlShutdown"


@pytest.mark.parametrize(
    ("visible", "count", "names"), [(None, 2, ["0", "1"]), ("5,GPU-a", 2, ["5", "GPU-a"]), ("", 2, []), ("4,5", 0, [])]
)
def test_gpus_are_those_that_the_driver_counts_and_the_environment_names(monkeypatch, visible, count, names):
    driver = FakeDriver(count=count)
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.visible_gpus() == names
    assert driver.calls[-1][0] == "nvmlShutdown"
    driver.fail = "nvmlDeviceGetCount_v2"
    assert machine.visible_gpus() == []


def test_an_asynchronous_sampler_fills_its_own_gpu():
    rollout = RolloutConfig.model_validate({"async": {"max_staleness": 1}})
    vllm = rollout.model_copy(update={"engine": "vllm"})  # which admits as many as fit
    for own, expected in ((rollout, [384, 256, 128, 32]), (vllm, [384, 256, 128, 256])):
        given = [sampler_sizes(own, "cuda", size * GIB // 1000, 80 * GIB) for size in (100, 170, 300, 900)]
        assert [found.max_num_seqs for found in given] == expected
    replayed = RolloutConfig.model_validate({"async": {"max_staleness": 1}, "replay": "runs/a"})
    assert sampler_sizes(replayed, "cuda", GIB // 10, 80 * GIB).max_num_seqs == 128


@pytest.mark.parametrize(("gib", "staleness", "place"), [(140, 1, "device"), (140, 16, "host"), (640, 16, "device")])
def test_earlier_versions_go_to_host_memory_if_they_do_not_fit(monkeypatch, gib, staleness, place):
    """An 8B model with int4 weights: a version takes 9 GiB with the operands of its products."""
    monkeypatch.setattr("qarl.memory.host.machine_bytes", lambda: 512 * GIB)
    section = {"max_response_length": 1024, "async": {"max_staleness": staleness}}
    given = config(rollout=section, optim={"offload": True})
    found = decide_sizes(given, "cuda", LARGE, gib * GIB)
    assert found.rollout.asynchronous.kept_versions == place
    assert f"rollout.async.kept_versions: auto -> {place} (cuda)" in list(decided(given, found, "cuda"))
    fixed = config(rollout={**section, "async": {**section["async"], "kept_versions": "device"}})
    assert decide_sizes(fixed, "cuda", LARGE, gib * GIB).rollout.asynchronous.kept_versions == "device"
