"""Memory of a micro-batch, against counts written out by hand and peaks measured on a GPU."""

import estimates
import pytest
from estimates import TINY

from qarl.config import Config
from qarl.config.architecture import Architecture
from qarl.memory import activations as counted
from qarl.memory import estimate as memory

GIB = 2**30

MEASURED = Architecture("qwen3", 2048, 6144, 28, 16, 8, 128, 49_152, 40_960, tied_embeddings=True)


def config(quant: dict | None = None, **sections) -> Config:
    return estimates.config(quant={"group_size": None, "scheme": "bf16", **(quant or {})}, **sections)


def fused(tokens: int, architecture: Architecture = TINY, **sections) -> counted.FusedPass:
    found = counted.fused_pass(config(**sections), architecture, "cuda", tokens)
    assert found is not None
    return found


# Peaks of torch.cuda.max_memory_allocated on an H200 with torch 2.11 (tools/bench_step.py of bba55fd6, --part learner
# --recompute elementwise): Qwen3-1.7B with 28 layers and a vocabulary of 49,152, micro-batches of 16,384 tokens in
# sequences of 512, 2,048 and 8,192 alike. Masters, gradients and one version are there; no optimizer and no KV cache.
@pytest.mark.parametrize(("scheme", "gib"), [("bf16", 34.0), ("w4a16", 32.7), ("w8a8", 32.7), ("fp8", 32.7)])
def test_a_forward_and_backward_take_what_a_gpu_measured(scheme, gib):
    items = memory.estimate(config(quant={"scheme": scheme}), MEASURED, "cuda", tokens=16_384)
    own = [item for item in items if item.owner == "learner"]
    assert memory.phase_bytes(own, "update") / GIB == pytest.approx(gib, rel=0.02)


def test_a_layer_keeps_what_its_mode_does_not_compute_again():
    stream, norm, qkv, out, lse, gate_up = 2 * 64, 4, 2 * (64 + 2 * 32), 2 * 64, 4 * 4, 2 * 2 * 128
    expected = {
        "elementwise": 2 * (stream + norm) + qkv + out + lse + gate_up,
        "mlp": 2 * (stream + norm) + qkv + out + lse,
        "products": stream + out + lse,
        "layer": stream,
    }
    for mode, layer in expected.items():
        assert fused(7, train={"recompute": mode}).kept_bytes == 7 * 2 * layer


def test_the_reference_and_a_shadow_run_during_a_backward():
    again = "forward of shadow or reference"
    full = {"scheme": "w8a8", "learner": "full_precision"}
    assert again in fused(64, objective={"name": "grpo", "kl_coef": 0.1}).temporaries()
    assert again in fused(64, quant=full, diagnostics={"shadow_every": 1}).temporaries()
    assert again not in fused(64, diagnostics={"shadow_every": 1}).temporaries()  # an aligned learner is its shadow


def test_kernels_need_a_gpu_and_16_bits_and_have_the_counted_buffers():
    assert counted.fused_pass(config(), TINY, "cpu", 7) is None
    assert counted.fused_pass(config(quant={"kernels": "reference"}), TINY, "cuda", 7) is None
    assert counted.fused_pass(config(model={"path": "x", "dtype": "float32"}), TINY, "cuda", 7) is None
    from qarl_kernels import head

    assert (counted.HEAD_PARTIAL, counted.HEAD_GRADIENT) == (head.PARTIAL, head.GRADIENT)
    assert (counted.HEAD_WIDTH, counted.HEAD_PITCH) == (head.WIDTH, head.PITCH)
    assert head.STATISTICS_TILE.block_n == counted.HEAD_TILE
