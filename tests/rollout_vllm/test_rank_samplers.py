"""vLLM with several ranks: samplers per rank and their faults. With a fake sampler, then with vLLM."""

import gc
import json
import os
import re
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fake_sampler
import forked_launch
import pytest
import torch
from needs_vllm import needs_cpu_build
from policy_models import make_policy
from run_faults import recorded
from test_train_ranks import on_two
from tiny_runs import Qarl, settings, write_config

from qarl.config import Config
from qarl.distributed.ranks import SingleProcess
from qarl.rollout.engine import SamplingParams
from qarl.rollout.shared import NoSampler
from qarl.rollout.vllm.process import sampler_environment
from qarl.weight_sync.fingerprints import PublishError
from qarl.weight_sync.transport import ReceiverPlan

MARK = "OF_RANKS"
# Each rank has its own file of troubles, and its sampler says which variables of a launcher reached it.
FAKE = f"""
import dataclasses, os, pathlib, sys
sys.path.append({str(Path(fake_sampler.__file__).parent)!r})
import fake_sampler
rank, real = os.environ["RANK"], fake_sampler.FakeHost.__init__
def init(self, settings, expected, phases):
    own = {{"troubles": settings.arguments["troubles"] + "-" + rank}}
    found = sorted(name for name in os.environ if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "QARL_RANKS"))
    print("{MARK}", found, flush=True)
    real(self, dataclasses.replace(settings, arguments=own), expected)
fake_sampler.FakeHost.__init__ = init
fake_sampler.install()
fake_sampler.limit_only_hangs(pathlib.Path(FOLDER))
"""


def faked(folder: Path) -> str:
    return FAKE.replace("FOLDER", repr(str(folder)))


@dataclass
class Done:
    """A run on several ranks that has ended.

    code: Exit code of the launcher, or of all forked ranks (a list if they differ). errors: Lines of the launcher.
    rollouts: Per step, [(prompt id, sample, completion)].
    """

    code: Any
    out: str
    err: str
    run: Path

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error: ")]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return recorded(self.run)

    @property
    def rollouts(self) -> list[list[tuple[int, int, str]]]:
        steps = [path.read_text().splitlines() for path in sorted((self.run / "rollouts").glob("*.jsonl"))]
        return [[(r["prompt_id"], r["sample"], r["completion"]) for r in map(json.loads, rows)] for rows in steps]


def train(qarl: Qarl, folder: Path, config: Path, count: int, before: str, *overrides: str) -> Done:
    """Run `qarl train --nproc`, with forks as ranks. before: Python code that each rank runs first."""
    (first := folder / "before.py").write_text(before)
    run = folder / "run"
    argv = ["train", "--nproc", count, config, f"train.run_dir={run}", *overrides]
    done = qarl.run(*argv, before=forked_launch.before(first))
    return Done(done.code, done.out, done.err, run)


def run_fake(
    qarl: Qarl,
    model: Path,
    folder: Path,
    *troubles: list[str],
    timeout_s: float = 600,
    forked: bool = False,
    vllm: dict[str, Any],
) -> Done:
    """Run two ranks with `qarl train`, or without it if `forked`. troubles: Those of rank 0, and of rank 1."""
    for rank, lines in enumerate(troubles):
        (folder / f"troubles-{rank}").write_text("\n".join(lines))
    rollout = {"engine": "vllm", "vllm": {"args": {"troubles": str(folder / "troubles")}, **vllm}}
    data = settings(model, rollout=rollout, train={"steps": 2}, checkpoint={"every": 100})
    data["model"]["device"] = "cpu"
    data["distributed"] = {"timeout_s": timeout_s}
    config, run = write_config(folder / "c.yaml", data), folder / "run"
    if not forked:
        return train(qarl, folder, config, 2, faked(folder))
    codes, printed = on_two(config, run, before=faked(folder))
    return Done(codes[0] if codes[0] == codes[1] else codes, printed[0], "", run)


@pytest.fixture
def fake(qarl: Qarl, even_model: Path, tmp_path: Path) -> Callable[..., Done]:
    """`run_fake` with `even_model`, in the test's directory."""
    return partial(run_fake, qarl, even_model, tmp_path)


@pytest.fixture(scope="module")
def one(qarl: Qarl, even_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A run without troubles of two ranks with one sampler."""
    folder = tmp_path_factory.mktemp("one")
    return run_fake(qarl, even_model, folder, [], forked=True, vllm={"data_parallel": 1})


def pids(done: Done, rank: int) -> list[int]:
    """Return the pids of a rank's samplers."""
    return fake_sampler.pids(done.run.parent / f"troubles-{rank}")


@pytest.mark.slow
def test_one_sampler_per_rank_generates_the_same_as_one_for_all_and_is_restarted(fake, one) -> None:
    done = fake(["generate none", "generate kill"], ["generate hang"], timeout_s=4, vllm={"timeout_s": 5})
    assert done.code == 0, done.err
    assert len(pids(done, 0)) == len(pids(done, 1)) == 2  # each was started twice
    assert not any(map(fake_sampler.alive, pids(done, 0) + pids(done, 1)))
    assert "restart 1 of 2" in done.out
    assert "rank 1: vLLM failed: it gave no sign of life for 5 s" in (done.run / "rank-001.log").read_text()
    logs = [done.run / "sampler.log", done.run / "rank-001" / "sampler.log"]
    assert [line for log in logs for line in log.read_text().splitlines() if MARK in line] == [f"{MARK} []"] * 4
    assert one.code == 0, one.out
    assert len(pids(one, 0)) == 1 and not (one.run / "rank-001" / "sampler.log").exists()
    assert one.rollouts == done.rollouts and len(done.rollouts) == 2


# One rank has no room on its GPU while it updates.
ROOMS = """
from qarl.rollout import shared
from qarl.rollout.vllm.engine import VLLMEngine
shared.has_headroom = lambda device, needed: rank != "1"
fake_sampler.FakeHost.sleep = lambda self, level: 1000
wake = VLLMEngine.wake
def noted(self):
    wake(self)
    with open(f"{FOLDER}/waking", "a") as file:
        print(self._waking, file=file)
VLLMEngine.wake = noted
"""


@pytest.mark.slow
def test_a_vllm_over_two_ranks_wakes_beside_their_updates_only_if_both_have_room(
    fake, one, tmp_path, monkeypatch
) -> None:
    monkeypatch.setitem(globals(), "FAKE", FAKE + ROOMS)
    done = fake([], forked=True, vllm={"tensor_parallel": 2})
    assert done.code == 0, done.out
    assert len(pids(done, 0)) == 2 and not (done.run / "rank-001" / "sampler.log").exists()
    assert set((tmp_path / "waking").read_text().split()) == {"False"}
    assert (tmp_path / "troubles-0.wakes").read_text().split() == ["woken"] * 4  # two parts, two steps
    assert one.rollouts == done.rollouts and len(done.rollouts) == 2


@pytest.mark.slow
def test_a_sampler_that_stays_dead_ends_the_run_on_all_ranks_with_a_checkpoint(fake) -> None:
    done = fake([], ["generate none", "publish kill", "start fail"], forked=True, vllm={"max_restarts": 0})
    first, second = done.code
    assert first.startswith("OtherRankFailed: rank 1") and "rollout.vllm: vLLM failed: its process" in first
    assert second.startswith("SamplerError: rollout.vllm: vLLM failed: its process")
    assert [record["step"] for record in done.metrics] == [1]
    assert (done.run / "checkpoints" / "latest").resolve().name == "000001"
    assert not any(map(fake_sampler.alive, pids(done, 0) + pids(done, 1)))


@pytest.mark.slow
def test_a_failed_start_is_reported_while_samplers_of_other_ranks_still_start(fake) -> None:
    began = time.monotonic()
    done = fake(["start hang"], ["start fail"], vllm={"timeout_s": 400})
    assert done.code == 2, done.err
    assert len(done.errors) == 1, done.err
    assert done.errors[0].startswith("error: rank 1: rollout.vllm: vLLM did not start: RuntimeError: out of blocks")
    assert time.monotonic() - began < 300  # of the 400 that the other may take
    assert not any(map(fake_sampler.alive, pids(done, 0) + pids(done, 1)))
    assert sorted(path.name for path in done.run.iterdir()) == ["rank-001", "sampler.log"]


def test_a_samplers_environment_has_no_variables_of_ranks() -> None:
    kept = {"PATH": "/bin", "NCCL_DEBUG": "INFO", "LOCAL_MODELS": "m", "XDG_CACHE_HOME": "/root/.cache"}
    launcher = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "QARL_RANKS"), "1")
    launcher |= {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    own = sampler_environment(kept | launcher, ReceiverPlan(fds=(3,)))
    assert own.pop("PYTHONPATH") == os.pathsep.join(p for p in sys.path if p)
    cache = {"VLLM_CACHE_ROOT": "/root/.cache/vllm/rank-1"}
    assert own == kept | cache | {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    alone = sampler_environment(kept | {"GLOO_SOCKET_IFNAME": "eth0"}, ReceiverPlan(fds=(3,)))
    assert alone["GLOO_SOCKET_IFNAME"] == "eth0"  # the user's, of a run without a launcher


@pytest.mark.parametrize(("visible", "gpus", "found"), [(None, (1,), "1"), ("4,5,6", (2, 1), "6,5")])
def test_a_sampler_sees_only_its_gpus(visible, gpus, found) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert sampler_environment(environment, ReceiverPlan(gpus=gpus))["CUDA_VISIBLE_DEVICES"] == found


def test_a_rank_without_a_sampler_has_no_prompts_and_keeps_no_older_version(tiny_model) -> None:
    policy, sampling = make_policy(tiny_model("qwen2"), "w8a8", torch.float32), SamplingParams(1, 0, 4)
    engine = NoSampler(policy.sampler)
    with pytest.raises(PublishError):
        engine.generate([], sampling, 0)
    old = policy.current
    policy.refresh(1)
    with pytest.raises(PublishError, match="the learner is at version 1"):
        engine.publish(old)
    weight = weakref.ref(next(iter(old.published.values())))
    del old
    assert weight() is not None
    engine.publish(policy.current)
    gc.collect()
    assert weight() is None and policy.sampler.current
    assert engine.generate([], sampling, 1) == []


def test_items_are_shared_among_the_chosen_ranks() -> None:
    ranks = SingleProcess()
    ranks.count = 4
    dealt = []
    for rank in range(4):
        ranks.rank = rank
        dealt.append([list(ranks.share(5, among)) for among in (None, range(2), range(1), range(0, 4, 2))])
    assert dealt == [
        [[0, 1], [0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2]],
        [[2], [3, 4], [], []],
        [[3], [], [], [3, 4]],
        [[4], [], [], []],
    ]


@pytest.mark.parametrize(
    ("vllm", "count", "drawing"),
    [
        ({}, 3, [0, 1, 2]),
        ({"data_parallel": 2}, 3, [0, 1]),
        ({"tensor_parallel": 2}, 4, [0, 2]),
        ({"tensor_parallel": 2, "data_parallel": 1}, 4, [0]),
        ({"tensor_parallel": 2, "device": 4}, 4, [0, 1, 2, 3]),
    ],
)
def test_which_ranks_have_a_vllm(vllm, count, drawing) -> None:
    config = Config.model_validate(settings(Path("here"), rollout={"engine": "vllm", "vllm": vllm}))
    assert list(config.rollout.samplers(count)) == drawing


@pytest.mark.slow
@needs_cpu_build
def test_two_ranks_with_a_vllm_each_train(qarl_with_vllm, tiny_model, tmp_path) -> None:
    vllm = {"engine": "vllm", "vllm": {"publish": "delta"}}
    data = settings(tiny_model(head_dim=32), rollout=vllm, train={"steps": 2}, checkpoint={"every": 100})
    data["model"]["device"] = "cpu"
    config = write_config(tmp_path / "c.yaml", data)
    done = train(qarl_with_vllm, tmp_path, config, 2, "")
    assert done.code == 0, done.err
    assert "vLLM failed" not in done.out + (done.run / "rank-001.log").read_text()
    for record in done.metrics:
        assert record["publish/proved_frac"] > 0.99 and 0 < record["publish/sent_frac"] < 0.9
        assert record["mismatch/delta_abs_max"] == 0
        assert 0 < record["time/sampler_prepare_s"] < record["time/sampler_start_s"]
    for log in (done.run / "sampler.log", done.run / "rank-001" / "sampler.log"):
        (line,) = [line for line in log.read_text().splitlines() if "vLLM is ready after" in line]
        told = re.findall(r"(\w+) \d+\.\d\d(?:,|$)", line.partition(" s: ")[2])
        before = ["process", "imports", "order", "engine", "device", "weights", "compile"]
        assert told == [*before, "profile", "kv_cache", "warm_up", "ready"]
