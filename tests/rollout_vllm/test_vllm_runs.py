"""Whole runs on vLLM's own kernels: a reload that breaks vLLM, and a sampler that is killed.

Samplers are forks; they start as users' do in test_rank_samplers.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_sampler
import pytest
from needs_vllm import needs_cpu_build
from run_faults import repeatable
from tiny_runs import settings, write_config

pytestmark = [pytest.mark.slow, needs_cpu_build]

# vLLM's INT8 product as it is without `keep_int8_scales_alive`, from the publish after the second step on: it reads its
# scales by address, and a reload frees them. What is there afterwards is chance; here it is NaN. With AMX vLLM uses
# another product.
FORGET_SCALES = """
import torch
torch.cpu._is_amx_tile_supported = lambda: False
from qarl.rollout.vllm.engine import VLLMEngine
real = VLLMEngine.publish
def publish(self, snapshot):
    if self.config.quant.scheme != "w8a8" or snapshot.version < 4:
        return real(self, snapshot)
    import vllm._custom_ops as ops
    keeping = ops.create_onednn_scaled_mm
    def forgetting(weight, scales, *rest):
        gone = scales.clone()
        handle = keeping.__wrapped__(weight, gone, *rest)
        handle.gone = gone.fill_(float("nan"))
        return handle
    ops.create_onednn_scaled_mm = forgetting
    try:
        real(self, snapshot)
    finally:
        ops.create_onednn_scaled_mm = keeping
VLLMEngine.publish = publish
"""
KILL_IN_SECOND_ROLLOUT = f"""
import os, signal, sys
sys.path.append({str(Path(__file__).parent)!r})
from listening import listening
from qarl.rollout.vllm.process import SamplerProcess
real, rollouts = SamplerProcess.begin, []
def begin(self, operation, payload):
    second = operation == "generate" and len(rollouts) == 1
    if second:  # held still, so that the rollout cannot end before the kill: the next publish would notice the death
        os.kill(self.pid, signal.SIGSTOP)
    real(self, operation, payload)
    if operation == "generate":
        print("sampler", self.pid)
        print("listening", listening(os.getpid()), listening(self.pid))
        rollouts.append(self.pid)
    if second:
        os.kill(self.pid, signal.SIGKILL)
SamplerProcess.begin = begin
"""


@pytest.fixture
def config(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    rollout = {"engine": "vllm", "numerics": "fast"}
    data = settings(tiny_model(head_dim=32), rollout=rollout, train={"steps": 3}, checkpoint={"every": 100})
    return write_config(tmp_path / "c.yaml", data)


def agreed(record: dict[str, Any], proved: float, mismatch: float) -> bool:
    """Return whether `proved_frac` reaches `proved`, and sampler and learner differ by less than `mismatch` nats."""
    gaps = record["publish/canary_abs_max"], record["mismatch/delta_abs_max"]
    return record["publish/proved_frac"] >= proved and all(0 < gap < mismatch for gap in gaps)


def test_a_reload_that_leaves_vllm_with_freed_scales_is_caught_in_its_step(qarl_with_vllm, config, tmp_path) -> None:
    run = tmp_path / "run"
    overrides = "rollout.vllm.process=inline", "quant.scheme=w8a8", "quant.group_size=null"
    done = qarl_with_vllm.run("train", config, f"train.run_dir={run}", *overrides, before=FORGET_SCALES)
    assert done.code == 2
    error = done.err.splitlines()[-1]  # vLLM's libraries may have printed before
    assert error.startswith("error: publish of version 4: vLLM's log-probs on the canary are off by")
    records = repeatable(run)
    assert [record["step"] for record in records] == [1, 2]  # the step is done, and saved
    assert (run / "checkpoints" / "latest").resolve().name == "000002"
    assert all(agreed(record, 0.25, 1.0) for record in records)  # oneDNN hides the weights


def test_a_run_survives_its_samplers_death_and_no_process_listens(qarl_with_vllm, config, tmp_path) -> None:
    run = tmp_path / "run"
    overrides = f"train.run_dir={run}", "quant.scheme=bf16", "quant.group_size=null"
    done = qarl_with_vllm.run("train", config, *overrides, before=KILL_IN_SECOND_ROLLOUT)
    assert (done.code, done.err) == (0, "")
    log = run / "sampler.log"
    assert [line for line in done.out.splitlines() if line.startswith("warning: ")] == [
        f"warning: vLLM failed: its process was ended by SIGKILL, perhaps for lack of memory; restart 1 of 2; see {log}"
    ]
    records = repeatable(run)
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(agreed(record, 0.01, 0.05) for record in records)
    found = [line for line in done.out.splitlines() if line.startswith("listening ")]
    assert found == ["listening [] []"] * len(found) and len(found) >= 3
    pids = [int(line.split()[1]) for line in done.out.splitlines() if line.startswith("sampler ")]
    assert len(set(pids)) == 2 and not any(map(fake_sampler.alive, pids))
    assert "INFO" in log.read_text() and not (run / "sampler").exists()
