"""`qarl verify-exact` on a CUDA device: every scheme is exact, and a fault is found, decodes being CUDA graphs."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import qarl
from qarl.policy.layer import DecoderLayer

# Whole blocks of 128 in every expert, which fp8_block needs to hold those of a layer as one weight.
WHOLE = {
    "mixtral": {"hidden_size": 128},
    "qwen2_moe": {"hidden_size": 128, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 256},
}
SCHEMES = [("bf16", None), ("w4a16", 32), ("w8a8", None), ("fp8", None), ("fp8_block", None), ("w4a8", 32)]
ROOT = Path(__file__).parents[2]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}  # which vLLM has kernels for
# From the second round on, a norm's weights in vLLM are others, in place, where CUDA graphs read them too.
VLLM_FAULT = """
import json, sys, torch
from dataclasses import asdict
import qarl
from qarl.exactness.engines import VLLM
from qarl.exactness.request import Sizes
Sizes.prompts = lambda self, response, drawn=0: 4
real, rounds = VLLM.sample, []
def draw(self, one):
    rounds.append(one)
    if len(rounds) == 2:
        weights = self._engine._sampler._host.numerics.forward._weight_set
        with torch.inference_mode():
            weights.values["model.layers.1.post_attention_layernorm.weight"].mul_(1.5)
    return real(self, one)
VLLM.sample = draw
if __name__ == "__main__":
    model, scheme, group, out = sys.argv[1:]
    found = qarl.verify_exact(
        model, scheme=scheme, group_size=int(group) or None, engine="vllm", tokens=3000, longest=300, device="cuda"
    )
    with open(out, "w") as file:
        json.dump(asdict(found), file)
"""
TRUNCATIONS = [{"temperature": 0.7}, {"top_k": 20, "min_p": 0.02}, {"temperature": 1.2, "top_p": 0.9}]


@pytest.mark.parametrize(("scheme", "group"), [*SCHEMES, ("nvfp4a16", None)])
@pytest.mark.parametrize("family", ["llama", "qwen3", *WHOLE])
def test_every_scheme_is_exact(tiny_model, family, scheme, group):
    model = tiny_model(family, **WHOLE.get(family, {}))
    found = qarl.verify_exact(model, scheme=scheme, group_size=group, tokens=4000, longest=400, device="cuda")
    assert found.exact, found.first
    assert found.tokens >= 4000 and found.preemptions > 0


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="e4m3 needs compute capability 8.9",
)
@pytest.mark.parametrize(("family", "scheme"), [("llama", "bf16"), ("qwen3", "fp8"), ("qwen2_moe", "w8a8")])
def test_an_fp8_kv_cache_is_exact(tiny_model, family, scheme):
    model = tiny_model(family, **WHOLE.get(family, {}))
    found = qarl.verify_exact(model, scheme=scheme, kv_cache_dtype="fp8", tokens=2000, longest=400, device="cuda")
    assert found.exact, found.first
    assert found.kv_cache_dtype == "fp8" and found.preemptions > 0


@pytest.mark.parametrize("vocabulary", [259, 2050])  # rows of the second do not each begin at a multiple of 16 bytes
@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_every_truncation_is_exact(tiny_model, truncation, vocabulary):
    model = tiny_model("qwen3", vocab_size=vocabulary)
    found = qarl.verify_exact(
        model, scheme="w4a16", group_size=32, tokens=2000, longest=300, device="cuda", **truncation
    )
    assert found.exact, found.first


def test_a_fault_of_the_sampler_is_found_in_its_layer_and_operation(tiny_model, monkeypatch):
    real = DecoderLayer._attend

    def faulty(self, qkv, run):
        if hasattr(run.attention, "caches") and self.index == 1:
            run.attention.caches[1][1][:, :, 0] = 1.0  # the values of every page's first token
        return real(self, qkv, run)

    monkeypatch.setattr(DecoderLayer, "_attend", faulty)
    found = qarl.verify_exact(tiny_model("qwen3"), tokens=200, longest=64, device="cuda")
    assert not found.exact and found.first is not None
    assert (found.first.layer, found.first.operation) == (1, "attention"), found.first


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize(("scheme", "group"), [("bf16", None), ("w4a16", 32)])
def test_vllm_is_exact_until_a_fault_which_is_found(tiny_model, tmp_path, scheme, group):
    out = tmp_path / "found.json"
    path = os.pathsep.join([*(str(ROOT / part) for part in (".", "kernels", "quant_formats")), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", VLLM_FAULT, *map(str, [tiny_model("qwen3", **SIZES), scheme, group or 0, out])],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stderr
    first = json.loads(out.read_text())["first"]
    assert (first["round"], first["layer"], first["operation"]) == (1, 1, "mlp_norm"), done.stdout
