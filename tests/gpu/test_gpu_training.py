"""The same configuration and the same code on a CUDA device, native engine: sampler and learner agree to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from qarl_kernels import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"),
]

SCHEMES = [("bf16", None), ("w4a16", 32), ("w8a8", None), ("fp8", None), ("fp8_block", None), ("w4a8", 32)]


@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize("product", ["w8a8", "fp8", "w4a8"])
def test_low_bit_products_agree_with_the_cpu(product: str, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 64, generator=generator).bfloat16()
    codes = torch.randint(-8, 8, (48, 64), generator=generator).float()
    scale = torch.rand(48, 2 if product == "w4a8" else 1, generator=generator).bfloat16() * 0.01
    operation = getattr(reference, product)
    on_cpu = operation(x, codes, scale)
    on_gpu = operation(x.cuda(), codes.cuda(), scale.cuda()).cpu()
    # integer and FP8 products of these sizes are exact; the epilogue rounds float32 to bf16, one ulp apart at most
    torch.testing.assert_close(on_gpu, on_cpu, rtol=2**-7, atol=1e-6)


def metrics_of(model: Path, run_dir: Path, scheme: str, group_size: int | None) -> list[dict[str, float]]:
    """Of a short run of the native engine, a line a step."""
    from qarl.config import load_config
    from qarl.training.loop import train as run

    path = run_dir.with_suffix(".yaml")
    path.write_text(
        json.dumps(
            {
                "model": {"path": str(model)},
                "quant": {"scheme": scheme, "group_size": group_size},
                "rollout": {"n": 4, "max_response_length": 24, "max_num_seqs": 8},
                "data": {"source": "task:arithmetic", "chat_template": False, "max_prompt_length": 64},
                "reward": {"functions": [{"name": "length"}]},
                "optim": {"lr": 1e-4},
                "train": {"steps": 2, "prompts_per_step": 4, "minibatch_size": 8, "run_dir": str(run_dir)},
                "logging": {"tensorboard": False, "console": "none"},
            }
        )
    )
    assert run(load_config(path)) == 0
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("scheme", "group_size"), SCHEMES)
def test_training_runs_on_the_gpu_without_mismatch(tiny_model, tmp_path, scheme, group_size) -> None:
    records = metrics_of(tiny_model("qwen3"), tmp_path / "run", scheme, group_size)
    assert len(records) == 2
    assert max(r["mismatch/delta_abs_max"] for r in records) == 0.0
    assert all(r["policy/grad_norm"] > 0 for r in records)
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert "cuda" in json.dumps(environment).lower() or "nvidia" in json.dumps(environment).lower()


@pytest.mark.parametrize(("scheme", "group_size"), SCHEMES)
def test_two_runs_of_a_seed_are_equal_to_the_last_digit(tiny_model, tmp_path, scheme, group_size) -> None:
    model, measured = tiny_model("qwen3"), ("time/", "memory/", "throughput/")
    one, other = (
        [
            {name: value for name, value in record.items() if not name.startswith(measured)}
            for record in metrics_of(model, tmp_path / name, scheme, group_size)
        ]
        for name in ("one", "other")
    )
    assert len(one) == 2
    assert one == other
