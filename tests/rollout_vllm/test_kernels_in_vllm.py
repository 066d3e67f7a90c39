"""A tiny model in real vLLM with qarl's kernels: who multiplies, how close to the learner, what a reload leaves."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import ForkServer

from qarl.exporting.job import export_target
from qarl.inference.target import resolve_target

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.fixture(scope="module")
def found(
    tiny_model: Callable[..., Path], vllm_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What `kernels_in_vllm.py` saw of W4A16 with one layer left unquantized, and output layer and embedding tied."""
    directory = tmp_path_factory.mktemp("kernels")
    checkpoint, answer = directory / "checkpoint", directory / "answer.json"
    quant = {"scheme": "w4a16", "group_size": 32, "ignore": ["lm_head", "model.layers.1.mlp.down_proj"]}
    target = resolve_target(str(tiny_model(head_dim=32)), quant=quant)
    export_target(target, checkpoint, dtype=torch.bfloat16, max_shard_bytes=10**9)
    program, out, err = Path(__file__).with_name("kernels_in_vllm.py"), directory / "out", directory / "err"
    code = vllm_server.run(out, err, program=str(program), argv=[str(checkpoint), str(answer)])
    assert code == 0, err.read_text()[-4000:]
    return json.loads(answer.read_text())


def test_qarls_kernels_serve_every_linear_layer(found) -> None:
    assert found["unserved"] == []
    assert found["layers"] == 4 * 2
    assert found["served"] == ["DenseMethod", "W4A16Kernel"]


def test_log_probs_are_close_to_the_learners(found) -> None:
    # 0.004 and 0.018 seen (SmolLM2: 0.054 and 0.23): linear layers agree bit for bit, but attention is vLLM's own
    assert found["delta"]["mean"] < 0.01 and found["delta"]["max"] < 0.05


def test_logits_have_the_bits_of_the_learners_before_and_after_a_reload(found) -> None:
    assert found["logits_equal"] == {"first": True, "changed": False, "reloaded": True}


def test_layers_give_back_the_published_tensors_after_a_reload(found) -> None:
    assert found["not_as_published"] == []


def test_other_weights_change_the_outputs_and_the_first_ones_bring_them_back(found) -> None:
    assert found["changed_delta"]["mean"] > 0.1
    assert found["reloaded_equal"]


@pytest.mark.parametrize("truncation", ["temperature", "min_p", "top_k", "top_p", "all"])
def test_reported_log_probs_are_of_the_distribution_that_tokens_are_drawn_from(found, truncation) -> None:
    apart = found["truncated"][truncation]
    assert apart["mean"] < 0.05 < 0.1 < apart["untruncated"]
    assert apart["edge"] <= 3  # of 128 tokens


@pytest.mark.parametrize("scheme", ["bf16", "w4a16", "w4a8", "w8a8", "fp8", "fp8_block", "nvfp4a16"])
def test_a_fused_layer_that_vllm_builds_has_the_bits_of_the_learners_parts(found, scheme) -> None:
    assert found["schemes"][scheme]
