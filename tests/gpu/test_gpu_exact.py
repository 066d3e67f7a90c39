"""`rollout.numerics: exact` on a GPU: under CUDA graphs, chunked prefill, preemption and sleep no log-prob is off."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
SMALL = {"memory_frac": 0.1}  # several fit one GPU
LENGTHS = [2, 63, 65, 130, 700, 3000]
# Prompts come in chunks, and two long sequences do not fit the KV cache together.
ROLLOUT = {
    "engine": "vllm",
    "numerics": "exact",
    "max_num_seqs": 12,
    "max_batched_tokens": 200,
    "kv_cache_tokens": 4096,
    "vllm": SMALL,
}
EAGER = {"vllm": SMALL | {"enforce_eager": True}}
# name -> (family, scheme, group, more of the rollout); a name with FP8 KV has that cache
CASES: dict[str, tuple[str, str, int | None, dict[str, Any]]] = {
    "bf16": ("qwen3", "bf16", None, {}),
    "bf16 without graphs": ("llama", "bf16", None, EAGER),
    "w4a16": ("qwen3", "w4a16", 32, {}),
    "w8a8": ("llama", "w8a8", None, {}),
    "fp8": ("qwen3", "fp8", None, {}),
    "fp8_block": ("llama", "fp8_block", None, {}),
    "w4a8": ("llama", "w4a8", 32, {}),
    "nvfp4a16": ("qwen3", "nvfp4a16", None, {}),
    "w4a16, FP8 KV": ("qwen3", "w4a16", 32, {}),
    "bf16, FP8 KV": ("llama", "bf16", None, {}),
    "mixture in w8a8, FP8 KV without graphs": ("qwen3_moe", "w8a8", None, EAGER),
    "mixture in w4a16": ("mixtral", "w4a16", 32, {}),
    "mixture in fp8": ("qwen3_moe", "fp8", None, {}),
    "shared expert in w8a8": ("qwen2_moe", "w8a8", None, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_no_log_prob_is_off_by_a_bit(case: str, tiny_model, tmp_path: Path) -> None:
    family, scheme, group, more = CASES[case]
    quant = {"scheme": scheme, "group_size": group, "kv_cache_dtype": "fp8" if "FP8 KV" in case else "auto"}
    found = run(tmp_path, str(tiny_model(family, **SIZES)), quant, more)
    print(json.dumps(found))
    assert found["measured"] == {"tokens": [5, 1], "shaped": 0}
    rounds = {name: seen for name, seen in found.items() if name.startswith("version")}
    assert len(rounds) == 4
    for name, seen in rounds.items():
        assert not any(seen["wrong"].values()), (name, seen)
    assert all(any(seen["events"].get(kind) for seen in rounds.values()) for kind in ("preempted", "cached")), rounds
    assert found["proved_frac"] > 0.99
    sums = [seen["sum"] for seen in rounds.values()]
    assert sums[0] != sums[2] != sums[3]


def run(directory: Path, model: str, quant: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """What `exact_in_vllm.py` sees in a process of its own."""
    cases, answer = directory / "cases.json", directory / "answer.json"
    arguments = {
        "model": model,
        "sections": {"quant": quant, "rollout": ROLLOUT | more},
        "lengths": LENGTHS,
        "response": 70,
        "shaped": ["none", "top_p", "greedy", "min_p"],
    }
    cases.write_text(json.dumps({"case": arguments}))
    paths = [str(ROOT / part) for part in (".", "kernels", "quant_formats", "tests", "tests/training")]
    script = ROOT / "tests/rollout_vllm/exact_in_vllm.py"
    child = subprocess.run(
        [sys.executable, str(script), str(cases), str(answer)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths + sys.path)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert child.returncode == 0, child.stdout[-3000:] + child.stderr[-5000:]
    return json.loads(answer.read_text())["case"]
