"""Whole runs with asynchronous rollouts, whose sampler has its own process: equality, kills, restarts, replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import forked_launch
import psutil
import pytest
import torch
from tiny_runs import Qarl, settings, write_config

from qarl.storage.checkpoint import CheckpointStore

pytestmark = pytest.mark.slow

# The sampler's process starts as a user's does; otherwise it is a fork of the learner's.
START_SAMPLER = "import subprocess; from qarl.rollout.vllm import process; process.subprocess = subprocess"
# Kills the sampler's process at the N-th take of a step's responses.
KILL_SAMPLER = """
import os, signal
from qarl.rollout.asynchronous.engine import AsyncEngine
real, calls = AsyncEngine.take, []
def take(self, *arguments):
    calls.append(1)
    if len(calls) == N:
        os.kill(self._link.process.pid, signal.SIGKILL)
    return real(self, *arguments)
AsyncEngine.take = take
"""
# Kills the run itself after N steps were recorded, as `kill -9` does.
KILL_RUN = """
import os, signal
from qarl.training.recorder import Recorder
real = Recorder.log
def log(self, step, metrics):
    real(self, step, metrics)
    if step == N:
        os.kill(os.getpid(), signal.SIGKILL)
Recorder.log = log
"""
# Writes the pids of the samplers to a file.
PIDS = """
from qarl.rollout.asynchronous.process import AsyncProcess
ready = AsyncProcess.begin_with
def begin_with(self, settings):
    open("pids", "a").write(f"{self.pid}\\n")
    ready(self, settings)
AsyncProcess.begin_with = begin_with
"""
SLOW_REWARD = """
import time
def slow(completions, **columns):
    time.sleep(0.5)
    return [float(len(text) % 5) for text in completions]
"""
# Long responses, two at a time, so that weights arrive while some are in progress.
SLOW_SAMPLER = "rollout.max_response_length=120", "rollout.max_num_seqs=2"
RARE_REWARD = """
def rare(completions, **columns):
    return [float(sum(map(ord, text)) % 6 == 0) for text in completions]
"""
STOPS = "rollout.stop_token_ids=[70, 71, 72, 73, 74, 75, 76, 77, 78, 79]"
OF_TIMES = ("time/", "memory/", "throughput/", "async/", "publish/")


class Runs:
    """Runs of one configuration, each in a directory of its own."""

    def __init__(self, qarl: Qarl, model: Path, folder: Path) -> None:
        self.qarl, self.folder = qarl, folder
        data = settings(
            model,
            rollout={"max_response_length": 40},
            train={"steps": 6, "threads": 1},
            logging={"rollouts_every": 1, "samples": 0},
        )
        self.config = write_config(folder / "c.yaml", data)

    def train(self, name: str, *overrides: str, before: str = "", code: int = 0, **ahead: Any) -> list[dict[str, Any]]:
        """The metrics of a run, without those that depend on time. ahead: `rollout.async`; nothing: synchronous."""
        given = [f"rollout.async={json.dumps(ahead)}"] if ahead else []
        run = [f"train.run_dir={self.folder / name}", *given, *overrides]
        done = self.qarl.run("train", self.config, *run, before=before, cwd=self.folder)
        assert done.code == code, done.err
        self.out, self.err = done.out, done.err
        if code:
            return []
        return [
            {key: value for key, value in row.items() if not key.startswith(OF_TIMES)} for row in self.metrics(name)
        ]

    def train_on_ranks(self, name: str, *overrides: str, before: str = "", **more: Any) -> list[dict[str, Any]]:
        """`train` on two ranks, each of which runs `before` first."""
        first = self.folder / "first.py"
        first.write_text(before)
        return self.train(name, *overrides, "--nproc", "2", before=forked_launch.before(first), **more)

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        """The masters of the last checkpoint."""
        masters = CheckpointStore.load(self.folder / name / "checkpoints" / "latest", groups=["masters"])
        return dict(masters.tensors["masters"])

    def metrics(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]

    def prompts(self, name: str) -> list[int]:
        """Ids of the prompts that the run learned from, in order."""
        files = sorted((self.folder / name / "rollouts").glob("*.jsonl"))
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        return [row["prompt_id"] for row in rows[::4]]


@pytest.fixture(scope="module")
def runs(qarl, llama, tmp_path_factory) -> Runs:
    return Runs(qarl, llama, tmp_path_factory.mktemp("async"))


@pytest.fixture(scope="module")
def synchronous(runs) -> list[dict[str, Any]]:
    return runs.train("sync")


@pytest.fixture(scope="module")
def rounds(runs) -> tuple[str, ...]:
    """Dynamic sampling with a reward that half of the groups get for none of their responses."""
    (runs.folder / "rare.py").write_text(RARE_REWARD)
    functions = json.dumps([{"name": f"{runs.folder / 'rare.py'}:rare"}])
    return f"reward.functions={functions}", "rollout.dynamic_sampling={max_rounds: 4, oversample: 1.0}"


def test_staleness_0_gives_the_numbers_of_the_synchronous_run(runs, synchronous):
    assert runs.train("zero", before=START_SAMPLER, max_staleness=0) == synchronous
    ages = [row["async/staleness_max"] for row in runs.metrics("zero")]
    assert ages == [0.0] * 6


def test_staleness_0_with_dynamic_sampling_and_a_pass_rate(runs, rounds):
    more = *rounds, "data.pass_rate=[0, 0.9]", "train.steps=4"
    rows = runs.train("dynamic", *more, max_staleness=0)
    assert rows == runs.train("dynamic_sync", *more)
    assert max(row["sampling/rounds"] for row in rows) > 1
    assert max(row["async/staleness_max"] for row in runs.metrics("dynamic")) == 0


def test_waiting_runs_repeat_bit_for_bit_after_a_kill_of_either_process(runs, synchronous):
    """The kill of the learner resumes from a checkpoint with responses of earlier versions in it.

    The runs that are killed keep earlier versions in host memory, the others on the device.
    """
    ahead = {"max_staleness": 2, "in_flight": "wait"}
    whole = runs.train("whole", **ahead)
    assert [row["async/staleness_max"] for row in runs.metrics("whole")] == [0.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    assert all(row["mismatch/delta_abs_max"] == 0.0 for row in whole)
    ahead["kept_versions"] = "host"
    assert runs.train("sampler_killed", before=KILL_SAMPLER.replace("N", "3"), **ahead) == whole
    assert "the sampler failed: its process was ended by SIGKILL" in runs.out and "restart 1 of 2" in runs.out
    runs.train("killed", before=KILL_RUN.replace("== N", "== 5"), code=-9, **ahead)
    assert runs.train("killed", **ahead) == whole
    assert runs.prompts("killed") == runs.prompts("whole") == runs.prompts("sync")


def test_weights_that_change_in_flight_stay_exact_and_a_kill_loses_and_repeats_no_prompt(runs, synchronous):
    ahead = {"max_staleness": 4, "in_flight": "recompute_kv"}
    more = *SLOW_SAMPLER, "train.steps=4"
    runs.train("flight", *more, before=KILL_RUN.replace("== N", "== 3"), code=-9, **ahead)
    rows = runs.train("flight", *more, **ahead)
    assert len(rows) == 4 and all(row["mismatch/delta_abs_max"] == 0.0 for row in rows)
    assert runs.prompts("flight") == runs.prompts("sync")[:16]
    assert max(row["async/continued_frac"] for row in runs.metrics("flight")) > 0, "no response saw new weights"
    assert max(row["async/staleness_max"] for row in runs.metrics("flight")) <= 4
    ahead["kept_versions"] = "host"
    assert runs.train("again", *more, "rollout.replay=" + str(runs.folder / "flight"), **ahead) == rows


def test_kept_keys_and_values_are_not_exact_and_nobody_is_warned(runs):
    rows = runs.train("kept", *SLOW_SAMPLER, "train.steps=3", max_staleness=2, in_flight="keep_kv")
    assert max(row["mismatch/delta_abs_max"] for row in rows) > 0
    assert "agree" not in runs.out.partition("mismatch/delta_abs_max")[0] and runs.err == ""


def test_partial_rollouts_are_learned_from_later_and_none_is_lost(runs, synchronous):
    """Responses of very different lengths: a step takes complete groups, and the bound on staleness holds."""
    ahead = {"max_staleness": 3, "in_flight": "recompute_kv", "order": "finished"}
    more = STOPS, "rollout.max_response_length=80"
    runs.train("partial", *more, before=KILL_RUN.replace("== N", "== 3"), code=-9, **ahead)
    rows = runs.train("partial", *more, **ahead)
    assert all(row["mismatch/delta_abs_max"] == 0.0 for row in rows)
    assert sorted(runs.prompts("partial")) == sorted(runs.prompts("sync"))
    assert max(row["async/staleness_max"] for row in runs.metrics("partial")) <= 3
    assert runs.train("partial_again", *more, f"rollout.replay={runs.folder / 'partial'}", **ahead) == rows


def test_a_step_takes_the_first_groups_of_a_wave_and_cancels_the_rest(runs, synchronous):
    """After a kill of the sampler or of the run, too. A replay learns from the same groups."""
    ahead = {"max_staleness": 2, "in_flight": "recompute_kv", "oversample": 1.5}
    more = STOPS, "rollout.max_response_length=80", "rollout.max_num_seqs=8"
    runs.train("waves", *more, before=KILL_RUN.replace("== N", "== 3"), code=-9, **ahead)
    rows = runs.train("waves", *more, before=KILL_SAMPLER.replace("N", "2"), **ahead)
    assert "restart 1 of 2" in runs.out
    assert all(row["mismatch/delta_abs_max"] == 0.0 for row in rows)
    assert max(row["async/staleness_max"] for row in runs.metrics("waves")) <= 2
    runs.train("order", "train.prompts_per_step=6", "rollout.max_response_length=8")
    started, learned = runs.prompts("order"), runs.prompts("waves")
    assert len(learned) == 24 and len(started) == 36
    for step in range(6):
        taken, wave = learned[4 * step : 4 * step + 4], started[6 * step : 6 * step + 6]
        assert taken == [prompt for prompt in wave if prompt in taken], "in the order of the data, each once"
    cancelled = [row["async/cancelled_frac"] for row in runs.metrics("waves")]
    assert max(cancelled) > 0 and learned != [p for i in range(6) for p in started[6 * i : 6 * i + 4]]
    assert runs.train("waves_again", *more, f"rollout.replay={runs.folder / 'waves'}", **ahead) == rows


def test_the_newest_policy_as_proximal_one_leaves_staleness_to_the_correction(runs):
    rows = runs.train("newest", max_staleness=2, proximal="newest")
    assert rows[0]["mismatch/delta_abs_max"] == 0.0 < rows[3]["mismatch/delta_abs_max"]


def test_verifying_a_share_of_the_log_probs_changes_nothing_that_is_learned(runs):
    """Entropy is of the responses that the learner ran at their version."""
    few = runs.train("few", "train.steps=4", max_staleness=2, verify_frac=0.25)
    for row, other in zip(few, runs.train("all", "train.steps=4", max_staleness=2), strict=True):
        assert {k: v for k, v in row.items() if "entropy" not in k} == {
            k: v for k, v in other.items() if "entropy" not in k
        }


def test_rewards_are_computed_while_the_sampler_and_the_learner_work(runs):
    """A step's reward takes 0.5 s or more. With two steps ahead the learner waits for less than that in total."""
    (runs.folder / "slow.py").write_text(SLOW_REWARD)
    functions = json.dumps([{"name": f"{runs.folder / 'slow.py'}:slow"}])
    runs.train("slow", f"reward.functions={functions}", "train.steps=4", max_staleness=3)
    waited = [row["time/rollout_s"] for row in runs.metrics("slow")]
    assert waited[0] > 0.5, "the first step waits for its rewards"


def test_a_sampler_that_fails_again_and_again_ends_the_run_in_one_line(runs):
    before = KILL_SAMPLER.replace("len(calls) == N", "True")
    runs.train("failing", before=before, code=2, max_staleness=1, max_restarts=1, in_flight="recompute_kv")
    last = runs.err.strip().splitlines()[-1]
    assert "rollout.async: the sampler failed: its process was ended by SIGKILL" in last
    assert "restarted 1 times already (rollout.async.max_restarts)" in last
    saved = [row["step"] for row in runs.metrics("failing")]
    assert (runs.folder / "failing" / "checkpoints" / f"{saved[-1]:06d}").is_dir(), "finished steps are saved"


def test_a_synchronous_run_does_not_drop_what_was_sampled_ahead(runs):
    runs.train("ahead", before=KILL_RUN.replace("== N", "== 3"), code=-9, max_staleness=1)
    runs.train("switch", f"checkpoint.resume={runs.folder / 'ahead' / 'checkpoints' / 'latest'}", code=2)
    assert "prompts were sampled ahead of the learner" in runs.err and "set rollout.async as it was" in runs.err


def test_a_replay_names_what_does_not_fit(runs, synchronous):
    recorded = "rollout.replay=" + str(runs.folder / "sync")
    assert runs.train("replayed", recorded) == synchronous
    runs.train("longer", recorded, "train.steps=7", code=2)
    assert "has no rollouts of step 7" in runs.err
    runs.train("other_seed", recorded, "train.seed=5", code=2)
    assert "has other prompts than this run" in runs.err


# --- two ranks, each with a sampler


@pytest.fixture(scope="module")
def synchronous_ranks(runs) -> list[dict[str, Any]]:
    return runs.train_on_ranks("ranks_sync")


def on_rank(rank: int, code: str) -> str:
    """Python that runs `code` on one rank only."""
    return f"import os\nif os.environ.get('RANK') == '{rank}':\n" + "".join(f"    {x}\n" for x in code.splitlines())


def test_two_ranks_at_staleness_0_give_the_bits_of_the_synchronous_two(runs, synchronous_ranks):
    assert runs.train_on_ranks("ranks_zero", max_staleness=0) == synchronous_ranks
    weights = runs.weights("ranks_sync")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in runs.weights("ranks_zero").items())
    assert runs.prompts("ranks_zero") == runs.prompts("ranks_sync")


def test_two_ranks_at_staleness_0_with_dynamic_sampling(runs, rounds):
    more = *rounds, "train.steps=3"
    assert runs.train_on_ranks("ranks_dynamic", *more, max_staleness=0) == runs.train_on_ranks("ranks_dynamic_s", *more)


def kill_rank(rank: int, take: int) -> str:
    """Python that kills a rank itself, as `kill -9` does, at its N-th take."""
    return on_rank(rank, KILL_SAMPLER.replace("N", str(take)).replace("self._link.process.pid", "os.getpid()"))


def test_two_waiting_ranks_repeat_bit_for_bit_after_a_kill_of_a_sampler_or_a_rank(runs, rounds):
    ahead = {"max_staleness": 2, "in_flight": "wait"}
    whole = runs.train_on_ranks("ranks_whole", *rounds, **ahead)
    assert max(row["sampling/rounds"] for row in whole) > 1
    assert all(row["mismatch/delta_abs_max"] == 0.0 for row in whole)
    assert 0 < max(row["async/staleness_max"] for row in runs.metrics("ranks_whole")) <= 2
    before = on_rank(1, KILL_SAMPLER.replace("N", "3"))
    assert runs.train_on_ranks("ranks_sampler_killed", *rounds, before=before, **ahead) == whole
    assert [row["async/restarts"] for row in runs.metrics("ranks_sampler_killed")][-1] == 1.0
    runs.train_on_ranks("ranks_killed", *rounds, before=PIDS + kill_rank(1, 7), code=137, **ahead)
    assert "rank 1" in runs.err.strip().splitlines()[-1]
    assert len(runs.metrics("ranks_killed")) < 6
    pids = {int(pid) for pid in (runs.folder / "pids").read_text().split()}
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=5)
    assert len(pids) == 2 and not any(map(psutil.pid_exists, pids)), "samplers end with their ranks"
    assert runs.train_on_ranks("ranks_killed", *rounds, **ahead) == whole
    weights = runs.weights("ranks_whole")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in runs.weights("ranks_killed").items())


def test_partial_rollouts_of_two_ranks_continue_on_one(runs, synchronous_ranks):
    """A step takes complete groups of either rank, and the bound on staleness holds. No prompt is lost or repeated."""
    ahead = {"max_staleness": 3, "in_flight": "recompute_kv", "order": "finished"}
    more = STOPS, "rollout.max_response_length=80"
    runs.train_on_ranks("ranks_partial", *more, before=kill_rank(1, 4), code=137, **ahead)
    rows = runs.train("ranks_partial", *more, **ahead)
    assert "the number of ranks changed" in runs.out
    assert all(row["mismatch/delta_abs_max"] == 0.0 for row in rows)
    assert sorted(runs.prompts("ranks_partial")) == sorted(runs.prompts("ranks_sync"))
    assert max(row["async/staleness_max"] for row in runs.metrics("ranks_partial")) <= 3


def test_each_of_two_ranks_cancels_the_rest_of_its_share_of_a_wave(runs):
    ahead = {"max_staleness": 2, "in_flight": "recompute_kv", "oversample": 1.5}
    more = STOPS, "rollout.max_response_length=80", "rollout.max_num_seqs=8"
    runs.train_on_ranks("ranks_waves", *more, before=kill_rank(0, 4), code=137, **ahead)
    rows = runs.train_on_ranks("ranks_waves", *more, before=on_rank(1, KILL_SAMPLER.replace("N", "2")), **ahead)
    assert all(row["mismatch/delta_abs_max"] == 0.0 for row in rows)
    runs.train("ranks_order", "train.prompts_per_step=6", "rollout.max_response_length=8")
    started, learned = runs.prompts("ranks_order"), runs.prompts("ranks_waves")
    assert len(learned) == 24 and len(started) == 36
    for step in range(6):
        for rank in range(2):  # two of each rank's three
            first, wave = 4 * step + 2 * rank, started[6 * step + 3 * rank :][:3]
            assert learned[first : first + 2] == [prompt for prompt in wave if prompt in learned[first : first + 2]]
    assert max(row["async/cancelled_frac"] for row in runs.metrics("ranks_waves")) > 0


def test_a_sampler_of_a_rank_that_fails_again_and_again_ends_all_ranks_in_one_line(runs):
    before = on_rank(1, KILL_SAMPLER.replace("len(calls) == N", "True"))
    ahead = {"max_staleness": 1, "max_restarts": 1, "in_flight": "recompute_kv"}
    runs.train_on_ranks("ranks_failing", before=before, code=2, **ahead)
    last = runs.err.strip().splitlines()[-1]
    assert "rank 1" in last and "rollout.async: the sampler failed: its process was ended by SIGKILL" in last
    assert runs.metrics("ranks_failing"), "finished steps are saved"
