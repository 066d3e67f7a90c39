"""`qarl verify-exact` on a CUDA device: every scheme is exact, and a fault is found, decodes being CUDA graphs."""

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
