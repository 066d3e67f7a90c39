"""Short runs of SmolLM2 with vLLM as the sampler on a GPU: every way to publish, both kinds of kernels, sleep."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
ROOT = Path(__file__).parents[2]
SIZES = {  # whole blocks of 128 in every layer, fused ones too
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
CASES = {
    "w4a16 in vLLM's kernels": ["quant.scheme=w4a16"],
    "w4a16 with exact numerics": ["quant.scheme=w4a16", "rollout.numerics=exact"],
    "w4a16 in vLLM's kernels under graphs of the decode": [
        "quant.scheme=w4a16",
        "rollout.vllm.args={compilation_config: {mode: 0, cudagraph_mode: FULL_DECODE_ONLY}}",
    ],
    "deep sleep": ["quant.scheme=w4a16", "rollout.numerics=exact", "rollout.vllm.sleep_level=2"],
    "changed words": ["quant.scheme=fp8", "quant.group_size=null", "rollout.vllm.publish=delta"],
    "FP8 KV in vLLM's attention": ["quant.scheme=bf16", "quant.group_size=null", "quant.kv_cache_dtype=fp8"],
    "in one process": ["quant.scheme=w8a8", "quant.group_size=null", "rollout.vllm.process=inline"],
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_publishes_and_proves_every_version(case: str, smollm2: str, tmp_path: Path) -> None:
    records, output = run(tmp_path / "run", smollm2, CASES[case])
    assert "warning" not in output  # no restart, no publish sent twice
    for record in records:
        assert record["publish/canary_abs_mean"] < 0.5
        if not case.startswith("w4a16 in vLLM's kernels"):  # those repack
            assert record["publish/proved_frac"] > 0.9999  # int4's `weight_shape` is not in the layers
        assert record["memory/sampler_freed_gib"] > 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices; torch sees fewer")
@pytest.mark.parametrize("scheme", ["w4a16", "fp8", "bf16"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_model_on_two_gpus_is_published_and_proved(first: int, scheme: str, tiny_model, tmp_path: Path) -> None:
    """The learner's and the next one, or two of its own."""
    if torch.cuda.device_count() < first + 2:
        pytest.skip(f"needs {first + 2} CUDA devices")
    changes = [
        *(f"quant.scheme={scheme}", f"quant.group_size={64 if scheme == 'w4a16' else 'null'}"),
        *([f"rollout.vllm.device={first}"] if first else []),
        *("rollout.vllm.tensor_parallel=2", "data.max_prompt_length=96"),
        *("rollout.max_response_length=32", "model.max_length=128", "reward.functions=[{name: length}]"),
        "optim.lr=1e-4",
    ]
    records, output = run(tmp_path / "run", str(tiny_model("llama", **SIZES)), changes)
    assert "warning" not in output
    assert all(record["publish/canary_abs_mean"] < 0.5 for record in records)
    if scheme != "w4a16":
        assert all(record["publish/proved_frac"] > 0.99 for record in records)


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("scheme", ["fp8_block", "nvfp4a16"])
def test_a_model_of_whole_blocks_trains(scheme: str, numerics: str, tiny_model, tmp_path: Path) -> None:
    changes = [
        f"quant.scheme={scheme}",
        "quant.group_size=null",
        f"rollout.numerics={numerics}",
        "data.max_prompt_length=96",
        "rollout.max_response_length=32",
        "model.max_length=128",
        "reward.functions=[{name: length}]",
        "optim.lr=1e-4",
    ]
    records, output = run(tmp_path / "run", str(tiny_model("llama", **SIZES)), changes)
    assert "warning" not in output
    assert all(record["publish/canary_abs_mean"] < 0.5 for record in records)


MIXTURES = {  # schemes and hidden sizes that vLLM has different kernels of experts for
    "w4a16 in Marlin": ("w4a16", 256),
    "w4a16 in Triton": ("w4a16", 192),
    **{scheme: (scheme, 256) for scheme in ("nvfp4a16", "fp8", "fp8_block", "w8a8", "bf16")},
}


@pytest.mark.parametrize("case", MIXTURES)
def test_experts_in_vllms_kernels_follow_every_version(case: str, tiny_model, tmp_path: Path) -> None:
    """Under CUDA graphs of the decode, which know the first version's tensors by address; weights move far."""
    scheme, hidden = MIXTURES[case]
    heads = hidden // 64
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 512,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }
    graphs = "{compilation_config: {mode: 0, cudagraph_mode: FULL_DECODE_ONLY}}"
    changes = [
        *(f"quant.scheme={scheme}", f"quant.group_size={64 if scheme == 'w4a16' else 'null'}"),
        *("rollout.numerics=fast", f"rollout.vllm.args={graphs}", "diagnostics.routing_every=1"),
        *("data.max_prompt_length=96", "rollout.max_response_length=32", "model.max_length=128"),
        "reward.functions=[{name: length, options: {unit: tokens, target: 16}}]",
        *("optim.lr=3e-3", "optim.warmup_steps=0"),
    ]
    records, output = run(tmp_path / "run", str(tiny_model("mixtral", num_local_experts=8, **sizes)), changes)
    assert "warning" not in output
    log = (tmp_path / "run/sampler.log").read_text()
    assert ("reloads of weights cannot run as a CUDA graph" in log) == (scheme == "nvfp4a16")
    loaded = records[0]["mismatch/delta_abs_mean"]  # by vLLM's own loader, before any publish
    for record in records:
        assert record["publish/canary_abs_mean"] < 0.5
        assert record["mismatch/delta_abs_mean"] < 2 * loaded + 0.02


def run(directory: Path, model: str, changes: list[str]) -> tuple[list[dict[str, float]], str]:
    """The metrics of three steps of the quickstart with vLLM, and what was printed."""
    command = [
        sys.executable,
        "-m",
        "qarl.cli",
        "train",
        str(ROOT / "configs/quickstart.yaml"),
        f"model.path={model}",
        "rollout.engine=vllm",
        *([] if any("rollout.numerics" in change for change in changes) else ["rollout.numerics=fast"]),
        "rollout.vllm.memory_frac=0.1",
        "rollout.kv_cache_tokens=131072",
        "train.steps=3",
        f"train.run_dir={directory}",
        "evaluation.tasks=[]",
        "logging.console=plain",
        *changes,
    ]
    path = os.pathsep.join([str(ROOT / part) for part in (".", "kernels", "quant_formats")] + sys.path)
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    learned = [record for record in records if record["policy/zero_advantage_frac"] < 1]  # rewards of a prompt differ
    assert learned and all(record["quant/codes_changed_frac"] > 0 for record in learned)
    return records, ended.stdout
