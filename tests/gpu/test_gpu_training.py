"""The same configuration and the same code on a CUDA device, native engine: sampler and learner agree to the bit."""

import json
from pathlib import Path

import pytest
import torch
from qarl_kernels import reference

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


def metrics_of(
    model: Path,
    run_dir: Path,
    scheme: str,
    group_size: int | None,
    routing: str = "own",
    updates: int = 2,
    recompute: str = "elementwise",
    micro_batch_tokens: int = 16_384,
    balance: float = 0.0,
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
        micro_batch_tokens: `train.micro_batch_tokens`.
        balance: `objective.router_aux_coef`.
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
                "objective": {"name": "grpo", "router_aux_coef": balance}
                if balance
                else {"truncation_set": truncation_set},
                "optim": {"lr": lr},
                "train": {
                    "steps": 2,
                    "prompts_per_step": 4,
                    "minibatch_size": 16 // updates,
                    "recompute": recompute,
                    "micro_batch_tokens": micro_batch_tokens,
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


@ADA
def test_a_learner_in_full_precision_keeps_its_keys_and_values(tiny_model, tmp_path) -> None:
    """Of 16 bits, so that what the cache rounds is all that the two do not share."""
    mean = {}
    for cache in ("auto", "fp8"):
        how = {"learner": "full_precision", "kv_cache_dtype": cache}
        records = metrics_of(tiny_model("qwen3"), tmp_path / cache, "bf16", None, **how)
        mean[cache] = max(record["mismatch/delta_abs_mean"] for record in records)
    assert 2 * mean["auto"] < mean["fp8"] < 0.2


@ADA
def test_plain_torch_rounds_keys_and_values_too(tiny_model, tmp_path) -> None:
    how = {"kernels": "reference", "kv_cache_dtype": "fp8"}
    records = metrics_of(tiny_model("qwen3"), tmp_path / "run", "w4a16", 32, **how)
    assert all(record["policy/grad_norm"] > 0 and record["mismatch/delta_abs_mean"] < 0.05 for record in records)


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


@pytest.mark.parametrize(("family", "scheme", "group_size"), MIXTURES)
def test_the_balance_of_experts_is_that_of_the_minibatch_wherever_it_is_cut(
    tiny_model, tmp_path, family, scheme, group_size
) -> None:
    """With a coefficient that makes it most of the gradient. Cuts change the order of gradients' sums alone."""
    model, how = tiny_model(family), {"updates": 1, "balance": 50.0}
    sizes = {"whole": 16_384, "cut": 200}
    whole, cut = (
        metrics_of(model, tmp_path / name, scheme, group_size, micro_batch_tokens=size, **how)[0]
        for name, size in sizes.items()
    )
    without = metrics_of(model, tmp_path / "without", scheme, group_size, updates=1)[0]
    for name in ("router/aux_loss", "router/load_max"):
        assert cut[name] == pytest.approx(whole[name], rel=1e-6)
    assert cut["policy/grad_norm"] == pytest.approx(whole["policy/grad_norm"], rel=1e-3)
    assert whole["policy/grad_norm"] > 2 * without["policy/grad_norm"]


def unmeasured(records: list[dict[str, float]]) -> list[dict[str, float]]:
    """Without what a clock or an allocator says."""
    measured = ("time/", "memory/", "throughput/")
    return [{name: value for name, value in record.items() if not name.startswith(measured)} for record in records]
