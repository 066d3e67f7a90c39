"""`qarl verify-exact` on a CUDA device: every scheme is exact, and a fault is found, decodes being CUDA graphs."""

from __future__ import annotations

import pytest
import torch

import qarl
from qarl.policy.fused_layer import FusedLayer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"),
]

SCHEMES = [("bf16", None), ("w4a16", 32), ("w8a8", None), ("fp8", None), ("fp8_block", None), ("w4a8", 32)]
TRUNCATIONS = [{"temperature": 0.7}, {"top_k": 20, "min_p": 0.02}, {"temperature": 1.2, "top_p": 0.9}]


@pytest.mark.parametrize(("scheme", "group"), [*SCHEMES, ("nvfp4a16", None)])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_scheme_is_exact(tiny_model, family, scheme, group):
    found = qarl.verify_exact(
        tiny_model(family), scheme=scheme, group_size=group, tokens=4000, longest=400, device="cuda"
    )
    assert found.exact, found.first
    assert found.tokens >= 4000 and found.preemptions > 0


@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_every_truncation_is_exact(tiny_model, truncation):
    found = qarl.verify_exact(
        tiny_model("qwen3"), scheme="w4a16", group_size=32, tokens=2000, longest=300, device="cuda", **truncation
    )
    assert found.exact, found.first


def test_a_fault_of_the_sampler_is_found_in_its_layer_and_operation(tiny_model, monkeypatch):
    real = FusedLayer._attend

    def faulty(self, qkv, attention):
        if hasattr(attention, "caches") and self.modules.index == 1:
            attention.caches[1][1][:, :, 0] = 1.0  # the values of every page's first token
        return real(self, qkv, attention)

    monkeypatch.setattr(FusedLayer, "_attend", faulty)
    found = qarl.verify_exact(tiny_model("qwen3"), tokens=200, longest=64, device="cuda")
    assert not found.exact and found.first is not None
    assert (found.first.layer, found.first.operation) == (1, "attention"), found.first
