"""Short runs of SmolLM2 on several GPUs with a vLLM beside each rank: publishing, sleep, exact numerics, a death."""

import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from process_tree import TAIL, tails
from traced import run_traced

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices; torch sees fewer"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
ROOT = Path(__file__).parents[2]
STEPS = 3
LIMIT_S = 240  # two vLLMs start at once, on a machine that has compiled nothing
FP8 = ["quant.scheme=fp8", "quant.group_size=null"]
# name -> (GPUs that it takes, overrides)
CASES = {
    "on the ranks' GPUs": (2, ["quant.scheme=w4a16"]),
    "deep asleep": (2, ["quant.scheme=w4a16", "rollout.numerics=exact", "rollout.vllm.sleep_level=2"]),
    "changed words, awake": (2, [*FP8, "rollout.vllm.publish=delta", "rollout.vllm.sleep_level=0"]),
    "exact": (2, ["quant.scheme=w4a16", "rollout.numerics=exact"]),
    "one of two ranks": (2, ["quant.scheme=w4a16", "rollout.vllm.data_parallel=1"]),
    "one on a GPU of its own": (3, ["quant.scheme=w4a16", "rollout.vllm.data_parallel=1", "rollout.vllm.device=2"]),
    "on GPUs of their own": (4, ["quant.scheme=w4a16", "rollout.vllm.device=2"]),
}
# Rank 1's sampler is killed when it has its second rollout to draw.
KILL = """
import os, signal
from qarl.rollout.vllm.process import SamplerProcess
real, rollouts = SamplerProcess.begin, []
def begin(self, operation, payload):
    rollouts.extend([self.pid] * (operation == "generate"))
    real(self, operation, payload)
    if os.environ["RANK"] == "1" and operation == "generate" and len(rollouts) == 2:
        os.kill(self.pid, signal.SIGKILL)
SamplerProcess.begin = begin
"""


@pytest.mark.parametrize("case", CASES)
def test_every_rank_publishes_to_its_sampler(case: str, smollm2: str, tmp_path: Path) -> None:
    gpus, overrides = CASES[case]
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} CUDA devices")
    records, said = run(tmp_path, smollm2, overrides)
    assert "warning" not in said[0] and "vLLM failed" not in said[1]
    samplers = [log for log in (tmp_path / "run").rglob("sampler.log") if log.stat().st_size]
    assert len(samplers) == (1 if "rollout.vllm.data_parallel=1" in overrides else 2)
    shared = not any("device" in override or "sleep_level=0" in override for override in overrides)
    for record in records:
        assert record["publish/canary_abs_mean"] < 0.5
        if shared:
            assert record["memory/sampler_freed_gib"] > 1
        if case == "exact":
            assert record["mismatch/delta_abs_max"] == 0.0


CUT = {  # SmolLM2's nine heads are not cut in two
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("scheme", ["w4a16", "fp8", "bf16"])
def test_one_vllm_over_both_ranks_gpus_is_published_and_proved(scheme: str, tiny_model, tmp_path: Path) -> None:
    changes = [
        *(f"quant.scheme={scheme}", f"quant.group_size={64 if scheme == 'w4a16' else 'null'}"),
        *("rollout.vllm.tensor_parallel=2", "data.max_prompt_length=96", "rollout.max_response_length=32"),
        *("model.max_length=128", "reward.functions=[{name: length}]", "optim.lr=1e-4"),
    ]
    records, said = run(tmp_path, str(tiny_model("llama", **CUT)), changes)
    assert "warning" not in said[0] and "vLLM failed" not in said[1]
    assert not (tmp_path / "run/rank-001/sampler.log").exists()
    loaded = records[0]["mismatch/delta_abs_mean"]  # by vLLM's own loader, before any publish
    for record in records:
        assert record["publish/canary_abs_mean"] < 0.5
        assert record["mismatch/delta_abs_mean"] < 2 * loaded + 0.02
        assert record["memory/sampler_freed_gib"] > 0.05  # a small model
        if scheme != "w4a16":  # whose kernels repack
            assert record["publish/proved_frac"] > 0.99


def test_a_sampler_that_is_killed_is_started_again_beside_its_rank(smollm2: str, tmp_path: Path) -> None:
    _, said = run(tmp_path, smollm2, ["quant.scheme=w4a16"], KILL)
    assert "vLLM failed" not in said[0] and said[1].count("vLLM failed: its process was ended by SIGKILL") == 1


def run(folder: Path, model: str, changes: list[str], before: str = "") -> tuple[list[dict[str, float]], list[str]]:
    """The metrics of a few steps of the quickstart on two ranks, and what each rank printed.

    before: Python that each rank runs first.
    """
    (folder / "before.py").write_text(before)
    command = [
        *(sys.executable, str(ROOT / "tests/distributed/ranks_with.py"), str(folder / "before.py")),
        *("train", "--nproc", "2", str(ROOT / "configs/quickstart.yaml"), f"model.path={model}"),
        *("rollout.engine=vllm", f"train.steps={STEPS}", f"train.run_dir={folder / 'run'}", "evaluation.tasks=[]"),
        *([] if any("rollout.numerics" in change for change in changes) else ["rollout.numerics=fast"]),
        *("rollout.vllm.memory_frac=0.1", "rollout.kv_cache_tokens=131072"),  # several tests fit the GPUs
        *("logging.console=plain", "distributed.timeout_s=180", *changes),
    ]
    path = os.pathsep.join([str(ROOT / part) for part in (".", "kernels", "quant_formats")] + sys.path)
    with tempfile.TemporaryDirectory() as early:  # where ranks print before a run begins
        environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": early}
        try:
            ended = run_traced(command, environment, LIMIT_S)
        except TimeoutError as error:
            pytest.fail(f"{error}\n{tails(Path(early))}{tails(folder)}")
    assert ended.returncode == 0, ended.stdout[-TAIL:] + ended.stderr[-TAIL:] + tails(folder)
    other = (folder / "run" / "rank-001.log").read_text() if (folder / "run" / "rank-001.log").exists() else ""
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for record in records:
        shown = ("time/", "publish/", "quant/", "reward/", "policy/", "optim/")
        print({name: round(value, 7) for name, value in record.items() if name.startswith(shown)})
    for record in records:  # SmolLM2 may answer all of a step's prompts wrong, and then there is nothing to learn
        assert (record["quant/codes_changed_frac"] > 0) == (record["policy/zero_advantage_frac"] < 1)
    assert any(record["quant/codes_changed_frac"] > 0 for record in records)
    return records, [ended.stdout, other]
