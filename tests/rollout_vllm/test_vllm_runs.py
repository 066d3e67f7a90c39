"""Whole runs on real vLLM: every scheme's publishes, a reload that breaks vLLM, and a sampler that is killed.

Most runs share one process, with `rollout.vllm.process: inline`, since vLLM takes longer to import than to train. The
other has samplers that are forks; they start as users' do in test_rank_samplers.py.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fake_sampler
import pytest
from forks import Fork
from needs_vllm import needs_cpu_build
from run_faults import repeatable
from tiny_runs import Finished, Qarl, settings, write_config

pytestmark = [pytest.mark.slow, needs_cpu_build]

# vLLM's INT8 product as it is without `keep_int8_scales_alive`, from the publish after the second step on: it reads its
# scales by address, and a reload frees them. What is there afterwards is chance; here it is NaN.
FORGET_SCALES = """
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
BYTES = ["quant.group_size=null"]
# In this order: vLLM keeps the kernels that were registered once. name -> (overrides, Python to run first).
INLINE = {
    "w8a8": (["quant.scheme=w8a8", *BYTES], FORGET_SCALES),
    "fp8": (
        ["quant.scheme=fp8", *BYTES, "train.steps=2", "rollout.temperature=0.7", "rollout.vllm.publish=delta"],
        "",
    ),
    "unknown argument": (["quant.scheme=fp8", *BYTES, "rollout.vllm.args={no_such_thing: 1}"], ""),
    "bf16": (["quant.scheme=bf16", *BYTES], ""),
}


@dataclass
class Done(Finished):
    """A run that ended, and its directory."""

    run: Path

    @property
    def error(self) -> str:
        """The last line that it printed to stderr, where vLLM's libraries may have printed before."""
        return self.err.splitlines()[-1]

    def metrics(self) -> list[dict[str, Any]]:
        return repeatable(self.run)


@pytest.fixture(scope="module")
def config(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = settings(
        tiny_model(head_dim=32),
        rollout={"engine": "vllm", "numerics": "fast"},
        train={"steps": 3},
        checkpoint={"every": 100},
    )
    return write_config(tmp_path_factory.mktemp("vllm") / "c.yaml", data)


@pytest.fixture(scope="module")
def inline(config: Path) -> dict[str, Done]:
    """The runs of `INLINE`, by name."""
    folder = config.parent
    orders = [
        {
            "argv": ["train", str(config), f"train.run_dir={folder / name}", "rollout.vllm.process=inline", *overrides],
            "output": str(folder / name),
            "before": before,
        }
        for name, (overrides, before) in INLINE.items()
    ]
    (folder / "orders.json").write_text(json.dumps(orders))
    program, out, err = Path(__file__).with_name("inline_runs.py"), folder / "inline.out", folder / "inline.err"
    runs = Fork("vllm_server", out, err, program=str(program), argv=[str(folder / "orders.json")])
    assert runs.wait() == 0, err.read_text()
    done = {}
    for name in INLINE:
        code, out, err = ((folder / f"{name}.{kind}").read_text() for kind in ("code", "out", "err"))
        done[name] = Done(int(code), out, err, folder / name)
    return done


@pytest.fixture(scope="module")
def killed(qarl_with_vllm: Qarl, config: Path) -> Done:
    """The bf16 run with a sampler process of its own, which is killed in the second rollout."""
    run = config.parent / "killed"
    overrides = [f"train.run_dir={run}", *INLINE["bf16"][0]]
    return Done(**vars(qarl_with_vllm.run("train", config, *overrides, before=KILL_IN_SECOND_ROLLOUT)), run=run)


@pytest.mark.parametrize(
    ("name", "steps", "proved", "mismatch"),
    [
        # Of FP8 every byte is read back; of W8A8 oneDNN hides the weights.
        ("bf16", 3, 0.01, 0.05),
        ("fp8", 2, 1.0, 0.2),
        ("w8a8", 2, 0.25, 1.0),
    ],
)
def test_publishes_are_proved_and_sampler_and_learner_agree(inline, name, steps, proved, mismatch) -> None:
    assert inline[name].code == (2 if name == "w8a8" else 0), inline[name].err
    records = inline[name].metrics()[:steps]
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    for record in records:
        assert record["publish/proved_frac"] >= proved
        assert 0 < record["publish/canary_abs_max"] < mismatch
        assert 0 < record["mismatch/delta_abs_max"] < mismatch


def test_a_reload_that_leaves_vllm_with_freed_scales_is_caught_in_its_step(inline) -> None:
    done = inline["w8a8"]
    assert done.code == 2
    assert done.error.startswith("error: publish of version 4: vLLM's log-probs on the canary are off by")
    assert [record["step"] for record in done.metrics()] == [1, 2]  # the step is done, and saved
    assert (done.run / "checkpoints" / "latest").resolve().name == "000002"


def test_an_argument_that_vllm_does_not_know_ends_the_run_in_one_line(inline) -> None:
    done = inline["unknown argument"]
    log = done.run / "sampler.log"
    assert done.code == 2
    assert done.error.startswith("error: rollout.vllm: vLLM did not start: TypeError: ")
    assert "'no_such_thing'" in done.error and done.error.endswith(f"; see {log}")
    assert "Traceback" in log.read_text()


def test_a_run_survives_its_samplers_death_with_the_metrics_of_an_undisturbed_one(killed, inline) -> None:
    assert killed.code == 0, killed.err
    warnings = [line for line in killed.out.splitlines() if line.startswith("warning: ")]
    assert warnings == [
        "warning: vLLM failed: its process was ended by SIGKILL, perhaps for lack of memory; restart 1 "
        f"of 2; see {killed.run / 'sampler.log'}"
    ]
    # The undisturbed one had vLLM in its own process.
    assert killed.metrics() == inline["bf16"].metrics()


def test_no_process_listens_or_survives_and_vllms_lines_stay_in_its_log(killed) -> None:
    found = [line for line in killed.out.splitlines() if line.startswith("listening ")]
    assert found == ["listening [] []"] * len(found) and len(found) >= 3
    pids = [int(line.split()[1]) for line in killed.out.splitlines() if line.startswith("sampler ")]
    assert len(set(pids)) == 2 and not any(map(fake_sampler.alive, pids))
    assert killed.err == "" and "INFO" in (killed.run / "sampler.log").read_text()
    assert not (killed.run / "sampler").exists()
