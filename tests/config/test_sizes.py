"""What null sizes become: a CPU's constants, and on a GPU what its memory and the model allow."""

from __future__ import annotations

from itertools import pairwise

import pytest

from qarl import machine, memory
from qarl.config import Config
from qarl.config.architecture import Architecture
from qarl.sizes import FEWEST_SEQUENCES, LOGITS_SHARE, UPDATE_SHARE, decide_sizes, decided, keep_sizes, sampler_sizes

GIB = 2**30
SMALL = Architecture("llama", 576, 1536, 30, 9, 3, 64, 49_152, 8192, tied_embeddings=True)
LARGE = Architecture("qwen3", 4096, 12_288, 36, 32, 8, 128, 151_936, 40_960, tied_embeddings=False)


def config(**sections) -> Config:
    base = {
        "model": {"path": "x"},
        "data": {"source": "task:arithmetic", "max_prompt_length": 512},
        "rollout": {"max_response_length": 1024},
        "reward": {"functions": [{"name": "exact"}]},
        "train": {"steps": 1, "prompts_per_step": 64},
    }
    return Config.model_validate({key: {**base.get(key, {}), **sections.get(key, {})} for key in {**base, **sections}})


def numbers(config: Config) -> tuple[int, int, int, int]:
    rollout, train = config.rollout, config.train
    return rollout.max_num_seqs, rollout.max_batched_tokens, train.micro_batch_tokens, train.logprob_chunk


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_a_cpu_has_the_numbers_it_always_had(engine):
    assert numbers(decide_sizes(config(rollout={"engine": engine}), "cpu")) == (64, 512, 4096, 128)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_given_stands(device):
    given = config(
        rollout={"max_num_seqs": 3, "max_batched_tokens": 5}, train={"micro_batch_tokens": 7, "logprob_chunk": 9}
    )
    assert decide_sizes(given, device, LARGE, 80 * GIB) == given


def test_nothing_but_the_sizes_changes():
    left, found = config(), decide_sizes(config(), "cuda", SMALL, 80 * GIB)
    assert found != left
    update = {"rollout": {"max_num_seqs", "max_batched_tokens"}, "train": {"micro_batch_tokens", "logprob_chunk"}}
    assert found.model_dump(exclude=update) == left.model_dump(exclude=update)


def test_a_large_gpu_does_more_at_once():
    assert numbers(decide_sizes(config(), "cuda", SMALL, 80 * GIB)) == (256, 4096, 32768, 4096)
    assert numbers(decide_sizes(config(rollout={"engine": "vllm"}), "cuda", SMALL, 80 * GIB))[:2] == (256, 8192)


def test_an_unknown_gpu_or_model_gets_what_fits_most():
    for architecture, size in ((None, 80 * GIB), (SMALL, None), (None, None)):
        assert numbers(decide_sizes(config(), "cuda", architecture, size)) == (FEWEST_SEQUENCES, 4096, 4096, 512)


@pytest.mark.parametrize("gib", [16, 24, 48, 80, 140])
def test_the_micro_batch_is_the_largest_that_the_estimate_leaves_room_for(gib):
    found = decide_sizes(config(), "cuda", SMALL, gib * GIB)
    chosen, room = found.train.micro_batch_tokens, UPDATE_SHARE * gib * GIB

    def peak(tokens: int) -> int:
        train = found.train.model_copy(update={"micro_batch_tokens": tokens})
        return memory.peak_bytes(memory.estimate(found.model_copy(update={"train": train}), SMALL, "cuda"))

    assert peak(chosen) <= room
    assert chosen == 32768 or peak(2 * chosen) > room


def test_more_memory_never_gives_less():
    for architecture in (SMALL, LARGE):
        found = [numbers(decide_sizes(config(), "cuda", architecture, gib * GIB)) for gib in (8, 16, 24, 40, 80, 140)]
        for smaller, larger in pairwise(found):
            assert all(a <= b for a, b in zip(smaller, larger, strict=True)), (smaller, larger)


def test_a_micro_batch_is_no_larger_than_a_step():
    small = config(train={"prompts_per_step": 1}, rollout={"n": 2, "max_response_length": 512})
    assert decide_sizes(small, "cuda", SMALL, 140 * GIB).train.micro_batch_tokens == 2048  # 2 sequences of 1024


def test_the_chunk_of_logits_follows_from_the_vocabulary():
    for architecture in (SMALL, LARGE):
        rows = decide_sizes(config(), "cuda", architecture, 80 * GIB).train.logprob_chunk
        assert 2 * 4 * rows * architecture.vocab_size <= LOGITS_SHARE * 80 * GIB
    assert rows == 2048


def test_a_vllm_that_never_sleeps_leaves_less_room_for_the_learner():
    def chosen(level: int) -> int:
        rollout = {"engine": "vllm", "vllm": {"sleep_level": level, "memory_frac": 0.6}}
        return decide_sizes(config(rollout=rollout), "cuda", SMALL, 48 * GIB).train.micro_batch_tokens

    assert chosen(0) < chosen(1)


def test_native_sequences_follow_from_their_keys_and_values():
    rollout = config().rollout
    assert sampler_sizes(rollout, "cuda", GIB, 80 * GIB).max_num_seqs == FEWEST_SEQUENCES
    assert sampler_sizes(rollout, "cuda", GIB // 8, 80 * GIB).max_num_seqs == 128
    assert sampler_sizes(rollout, "cuda", GIB // 64, 80 * GIB).max_num_seqs == 256
    given = rollout.model_copy(update={"kv_cache_tokens": 10**6})
    assert sampler_sizes(given, "cuda", GIB, 80 * GIB).max_num_seqs == 256


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("given", [{"max_num_seqs": 10_000}, {"max_batched_tokens": 8}])
def test_vllm_gets_a_token_for_each_sequence(device, given):
    found = sampler_sizes(config(rollout={"engine": "vllm", **given}).rollout, device)
    assert found.max_batched_tokens >= found.max_num_seqs
    assert given.items() <= found.model_dump().items()


def test_a_run_that_has_begun_keeps_its_sizes_on_another_device():
    begun = decide_sizes(config(), "cpu")
    assert decide_sizes(keep_sizes(config(), begun), "cuda", SMALL, 80 * GIB) == begun
    own = config(rollout={"max_num_seqs": 5})
    assert keep_sizes(own, begun).rollout.max_num_seqs == 5  # which the run directory then refuses


def test_each_decision_is_a_line():
    given = config(rollout={"max_num_seqs": 3})
    assert list(decided(given, decide_sizes(given, "cpu"), "cpu")) == [
        "rollout.max_batched_tokens: null -> 512 (cpu)",
        "train.micro_batch_tokens: null -> 4096 (cpu)",
        "train.logprob_chunk: null -> 128 (cpu)",
    ]


class FakeDriver:
    """The calls of libnvidia-ml.so.1 that are made, with one GPU of 80 GiB."""

    def __init__(self, fail: str = "") -> None:
        self.calls, self.fail = [], fail

    def __getattr__(self, name: str):
        def call(*arguments) -> int:
            self.calls.append((name, arguments))
            if name == "nvmlDeviceGetMemoryInfo":
                arguments[1]._obj.total = 80 * GIB
            return int(name == self.fail)

        return call


def test_the_memory_of_a_gpu_is_the_drivers(monkeypatch):
    driver = FakeDriver()
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert machine.gpu_bytes() == 80 * GIB
    assert driver.calls[1][0] == "nvmlDeviceGetHandleByIndex_v2" and driver.calls[1][1][0].value == 3
    assert driver.calls[-1][0] == "nvmlShutdown"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-12ab")
    driver.calls.clear()
    assert machine.gpu_bytes() == 80 * GIB
    assert driver.calls[1][:1] == ("nvmlDeviceGetHandleByUUID",) and driver.calls[1][1][0] == b"GPU-12ab"


@pytest.mark.parametrize("fail", ["nvmlInit_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetMemoryInfo"])
def test_a_driver_that_says_nothing_is_no_memory(monkeypatch, fail):
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: FakeDriver(fail))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine.gpu_bytes() is None


def test_a_machine_without_a_driver_has_no_gpu_memory(monkeypatch):
    def absent(name: str):
        raise OSError("no such library")

    monkeypatch.setattr(machine.ctypes, "CDLL", absent)
    assert machine.gpu_bytes() is None
