"""The same configuration and the same code on a CUDA device, native engine: sampler and learner agree to the bit."""

import json
from pathlib import Path

import pytest
import torch

SCHEMES = [("bf16", None), ("w4a16", 32), ("w8a8", None), ("fp8", None), ("fp8_block", None), ("w4a8", 32)]
MIXTURES = [("mixtral", "w4a16", 32), ("qwen3_moe", "fp8", None), ("olmoe", "bf16", None), ("qwen2_moe", "w8a8", None)]
FP8_KV = [("qwen3", "w4a16", 32), ("mistral", "bf16", None), ("llama", "fp8", None), ("mixtral", "w8a8", None)]
# Shorter than prompt and response, which have up to 88 tokens.
WINDOWS = {family: {"sliding_window": 40} for family in ("mistral", "mixtral")}
ADA = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="e4m3 needs compute capability 8.9",
)
RUNS = [("qwen3", *scheme) for scheme in SCHEMES] + MIXTURES


def metrics_of(
    model: Path,
    run_dir: Path,
    scheme: str,
    group_size: int | None,
    routing: str = "own",
    updates: int = 2,
    recompute: str = "elementwise",
    top_p: float = 1.0,
    truncation_set: str = "own",
    lr: float = 1e-4,
    **quant: str,
) -> list[dict[str, float]]:
    """Return the metrics of a short run of the native engine, one record per step.

    Args:
        model: Directory of the model.
        run_dir: Directory of the run.
        scheme: `quant.scheme`.
        group_size: `quant.group_size`.
        routing: `model.routing`.
        updates: Optimizer steps per training step of 16 responses.
        recompute: `train.recompute`.
        top_p: `rollout.top_p`.
        truncation_set: `objective.truncation_set`.
        lr: `optim.lr`.
        quant: More keys of that section.
    """
    from qarl.config import load_config
    from qarl.training.loop import train as run

    path = run_dir.with_suffix(".yaml")
    path.write_text(
        json.dumps(
            {
                "model": {"path": str(model), "routing": routing},
                "quant": {"scheme": scheme, "group_size": group_size, **quant},
                "rollout": {"n": 4, "max_response_length": 24, "max_num_seqs": 8, "top_p": top_p},
                "data": {"source": "task:arithmetic", "chat_template": False, "max_prompt_length": 64},
                "reward": {"functions": [{"name": "length"}]},
                "objective": {"truncation_set": truncation_set},
                "optim": {"lr": lr},
                "train": {
                    "steps": 2,
                    "prompts_per_step": 4,
                    "minibatch_size": 16 // updates,
                    "recompute": recompute,
                    "micro_batch_tokens": 16_384,
                    "run_dir": str(run_dir),
                },
                "logging": {"tensorboard": False, "console": "none"},
            }
        )
    )
    assert run(load_config(path)) == 0
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("family", "scheme", "group_size"), RUNS)
def test_training_runs_on_the_gpu_without_mismatch(tiny_model, tmp_path, family, scheme, group_size) -> None:
    records = metrics_of(tiny_model(family), tmp_path / "run", scheme, group_size)
    assert len(records) == 2
    assert max(r["mismatch/delta_abs_max"] for r in records) == 0.0
    assert all(r["policy/grad_norm"] > 0 for r in records)
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert "cuda" in json.dumps(environment).lower() or "nvidia" in json.dumps(environment).lower()


@pytest.mark.parametrize(("family", "scheme", "group_size"), RUNS)
def test_two_runs_of_a_seed_are_equal_to_the_last_digit(tiny_model, tmp_path, family, scheme, group_size) -> None:
    model = tiny_model(family)
    one, other = (metrics_of(model, tmp_path / name, scheme, group_size) for name in ("one", "other"))
    assert len(one) == 2
    assert unmeasured(one) == unmeasured(other)


@ADA
@pytest.mark.parametrize(("family", "scheme", "group_size"), FP8_KV)
def test_an_fp8_kv_cache_trains_without_mismatch_with_any_recompute(
    tiny_model, tmp_path, family, scheme, group_size
) -> None:
    model, fp8 = tiny_model(family, **WINDOWS.get(family, {})), {"kv_cache_dtype": "fp8"}
    modes = ("elementwise", "products", "layer")
    runs = [metrics_of(model, tmp_path / m, scheme, group_size, recompute=m, **fp8) for m in modes]
    assert max(record["mismatch/delta_abs_max"] for record in runs[0]) == 0.0
    assert all(record["policy/grad_norm"] > 0 for record in runs[0])
    assert all(unmeasured(run) == unmeasured(runs[0]) for run in runs[1:])
    plain = metrics_of(model, tmp_path / "auto", scheme, group_size)
    assert unmeasured(plain) != unmeasured(runs[0])


@pytest.mark.parametrize(("scheme", "group_size"), [("bf16", None), ("w4a16", 32)])
def test_replayed_sets_hold_every_sampled_token_after_an_update(tiny_model, tmp_path, scheme, group_size) -> None:
    model = tiny_model("llama")
    own, replay = (
        metrics_of(model, tmp_path / name, scheme, group_size, top_p=0.8, truncation_set=name, lr=1e-3)
        for name in ("own", "replay")
    )
    assert own[0]["policy/outside_frac_max"] > 0.0
    for record in replay:
        assert record["mismatch/delta_abs_max"] == record["mismatch/outside_frac"] == 0.0
        assert record["policy/outside_frac_max"] == 0.0


@pytest.mark.parametrize(("family", "scheme", "group_size"), MIXTURES)
def test_replay_of_an_exact_sampler_changes_nothing(tiny_model, tmp_path, family, scheme, group_size) -> None:
    model, how = tiny_model(family), (scheme, group_size)
    own = metrics_of(model, tmp_path / "own", *how, updates=1)
    replayed = metrics_of(model, tmp_path / "replay", *how, routing="replay", updates=1)
    assert all(record.pop("mismatch/routing_disagreement") == 0.0 for record in replayed)
    assert all(record.pop("mismatch/routing_tokens") == 0.0 for record in replayed)
    assert unmeasured(own) == unmeasured(replayed)


def unmeasured(records: list[dict[str, float]]) -> list[dict[str, float]]:
    """Without what a clock or an allocator says."""
    measured = ("time/", "memory/", "throughput/")
    return [{name: value for name, value in record.items() if not name.startswith(measured)} for record in records]
