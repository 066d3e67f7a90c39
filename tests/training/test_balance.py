"""The estimated times of sampling and learning, against formulas written out by hand and a measured run."""

import json
from pathlib import Path

import pytest
from plain_settings import plain_config

from qarl.config import Config
from qarl.config.architecture import Architecture
from qarl.memory.tensors import version_bytes
from qarl.training import balance
from qarl.training.balance import StepTime, assumed_length, split_text, step_time

TINY = Architecture("llama", 64, 128, 2, 4, 2, 16, 100, 1024, tied_embeddings=True)
QWEN3_17B = Architecture("qwen3", 2048, 6144, 28, 16, 8, 128, 151_936, 40_960, tied_embeddings=True)
MATRICES = 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 128 * 64)


def config(**sections) -> Config:
    base = {
        "model": {"device": "cuda"},
        "data": {"max_prompt_length": 64},
        "rollout": {"max_response_length": 80, "n": 8, "max_num_seqs": 384, "async": sections.pop("ahead", {})},
        "train": {"prompts_per_step": 32, "micro_batch_tokens": 8192, "recompute": "elementwise"},
        "quant": {"group_size": 32},
    }
    return plain_config(**{key: {**base.get(key, {}), **sections.get(key, {})} for key in {**base, **sections}})


def test_decodes_read_all_weights_once_per_step_and_keys_and_values_per_sequence():
    given = config(ahead={"max_staleness": 1})
    assert given.sequences == 384
    tokens, steps = 256 * 40, 256 * 40 / 384
    keys = 2 * tokens * (64 + 20) * 2 * 2 * 16 * 2
    expected = (version_bytes(given, TINY) * steps + keys) / (0.8 * 3.35e12) + 0.005 * steps
    assert step_time(given, TINY, 40).sampling == pytest.approx(expected)


def test_learning_counts_a_forward_a_backward_and_logp_old_of_stale_responses():
    rows, pairs = 32 * (64 + 8 * 39), 32 * (64 * 65 // 2 + 8 * (39 * 64 + 39 * 40 // 2))
    forward = 2 * MATRICES * rows + 2 * 100 * 64 * 256 * 40 + 4 * 4 * 16 * 2 * pairs
    for ahead, more, forwards in (
        ({"max_staleness": 0}, {}, 3),
        ({}, {}, 4),
        ({"verify_frac": 0.25}, {}, 3.25),
        ({}, {"train": {"epochs": 2, "recompute": "layer"}}, 1 + 2 * 4),
        ({}, {"objective": {"name": "grpo", "kl_coef": 0.1}}, 5),
    ):
        found = step_time(config(ahead=ahead, **more), TINY, 40).learning
        assert found == pytest.approx(forwards * forward / (0.45 * 989e12)), (ahead, more)


@pytest.mark.parametrize(
    ("sampling", "gpus", "samplers"), [(1.6, 8, 5), (1.0, 8, 4), (1e-3, 8, 1), (99.0, 8, 7), (3.0, 2, 1)]
)
def test_a_split_gives_both_sides_about_the_same_time(sampling, gpus, samplers):
    assert StepTime(sampling, 1.0).samplers(gpus) == samplers


def test_the_estimate_is_near_what_two_gpus_took():
    """Within a factor of 1.3 of the ratio that two asynchronous runs of the record had."""
    record = json.loads((Path(balance.__file__).parents[2] / "benchmarks/results/async_gpu.json").read_text())
    assert "Qwen3-1.7B" in record["note"]
    for length, limit, measured in ((350, 1024, 2.61 / 2.23), (1400, 4096, 16.22 / 8.82)):
        ahead = {"max_staleness": 2, "in_flight": "recompute_kv", "verify_frac": 0.1}
        rollout = {"max_response_length": limit, "n": 8, "max_num_seqs": 384}
        found = step_time(config(rollout=rollout, ahead=ahead), QWEN3_17B, length)
        assert 1 / 1.3 < found.ratio / measured < 1.3


def test_what_check_says():
    text = split_text(StepTime(1.6, 1.0), 128)
    assert "sampling takes 1.6 times as long as learning" in text and "of 8 GPUs, 5 for sampling and 3" in text
    assert "the learner waits for 38% of a step" in text
    assert "the sampler waits for 50% of a step" in split_text(StepTime(1.0, 2.0), 128)
    assert assumed_length(config()) == 40 and assumed_length(config(rollout={"max_response_length": 1, "n": 8})) == 1
