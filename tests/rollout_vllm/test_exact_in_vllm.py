"""`rollout.numerics: exact` in real vLLM: every log-prob is the learner's, whatever the scheduler does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forks import Fork
from needs_vllm import needs_cpu_build

pytestmark = [pytest.mark.slow, needs_cpu_build]
WHOLE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}  # blocks of 128
# Six long sequences do not fit the KV cache, so that vLLM preempts. name -> (family, changes of the model, sections).
ROLLOUT = {"engine": "vllm", "numerics": "exact", "kv_cache_tokens": 512, "max_num_seqs": 6}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bf16": ("llama", {"head_dim": 32}, {"quant": {"scheme": "bf16", "group_size": None}}),
    "w4a16": ("qwen3", {}, {"quant": {"ignore": ["lm_head", "model.layers.1.mlp.down_proj"]}}),
    "fp8_block": ("llama", WHOLE, {"quant": {"scheme": "fp8_block", "group_size": None}}),
    "w4a8, fp8 KV cache": ("qwen3", {}, {"quant": {"scheme": "w4a8", "kv_cache_dtype": "fp8"}}),
    "experts": ("mixtral", {"head_dim": 32, "sliding_window": 48}, {"quant": {"scheme": "fp8", "group_size": None}}),
    "w8a8": ("qwen2", {}, {"quant": {"scheme": "w8a8", "group_size": None}}),
    "some layers with experts": ("qwen3_moe", {}, {"quant": {"scheme": "nvfp4a16", "group_size": None}}),
}
SHAPED = ["greedy", "cold", "all"]


@pytest.fixture(scope="module")
def found(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `exact_in_vllm.py` saw, by case."""
    directory = tmp_path_factory.mktemp("exact")
    orders = {
        name: {
            "model": str(tiny_model(family, **changes)),
            "sections": sections | {"rollout": ROLLOUT},
            "lengths": [2, 50, 65, 120],  # within a page of the KV cache, at its end and beyond
            "response": 24,
            "shaped": SHAPED if name == "bf16" else SHAPED[-1:],
        }
        for name, (family, changes, sections) in CASES.items()
    }
    cases, answer = directory / "cases.json", directory / "answer.json"
    cases.write_text(json.dumps(orders))
    program, out, err = Path(__file__).with_name("exact_in_vllm.py"), directory / "out", directory / "err"
    runs = Fork("vllm_server", out, err, program=str(program), argv=[str(cases), str(answer)])
    assert runs.wait() == 0, out.read_text()[-2000:] + err.read_text()[-4000:]
    return json.loads(answer.read_text())


@pytest.mark.parametrize("name", CASES)
def test_no_log_prob_is_off_by_a_bit(found, name) -> None:
    """While vLLM preempts and uses its prefix cache, before and after a publish that changes the results."""
    case = found[name]
    for version in ("version 0", "version 1"):
        wrong = case[version]["wrong"]
        assert wrong and not any(wrong.values()), (version, wrong)
    events = case["version 0"]["events"]
    assert events.get("preempted", 0) > 0 and events.get("cached", 0) > 0, events
    assert case["proved_frac"] > 0.99
    assert abs(case["version 1"]["sum"] - case["version 0"]["sum"]) > 0.1
    assert case["measured"] == {"tokens": [5, 1], "shaped": 0}  # memory is measured with the draws of a rollout


def test_nothing_of_vllms_own_arithmetic_is_imported(found) -> None:
    assert found["own kernels"] == []


def test_stop_strings_end_responses_at_the_token_that_completes_them(found) -> None:
    """Not that of the prompt; also if vLLM has no text for it yet, or lost a space after bytes that became invalid."""
    assert found["ends"] == [0, 2, 5]
