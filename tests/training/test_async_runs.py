"""Whole runs with asynchronous rollouts, whose sampler has its own process: equality, kills, restarts, replay."""

import json
import re
from pathlib import Path
from typing import Any

import forked_launch
import psutil
import pytest
import torch
import yaml
from run_faults import (
    BY_ENGINE,
    kill_at_take,
    kill_run,
    kill_sampler,
    kill_sampler_at_publish,
    on_rank,
    recorded,
    repeatable,
    stop_at_take,
)
from tiny_runs import Qarl, settings, write_config

from qarl.batch.saved import read_rollouts, rollout_steps
from qarl.config import Config
from qarl.data import PromptStream
from qarl.storage.loading import load_checkpoint
from qarl.types import Prompt

pytestmark = pytest.mark.slow

# The sampler's process starts as a user's does; otherwise it is a fork of the learner's.
START_SAMPLER = "import subprocess; from qarl.rollout.vllm import process; process.subprocess = subprocess"
# Writes the pids of the samplers to a file.
PIDS = """
from qarl.rollout.asynchronous.process import AsyncProcess
ready = AsyncProcess.begin_with
def begin_with(self, settings):
    open("pids", "a").write(f"{self.pid}\\n")
    ready(self, settings)
AsyncProcess.begin_with = begin_with
"""
# The sampler generates after each tensor that it receives. Writes the number of responses in progress to `during`.
SMALL_PORTIONS = """
from qarl.rollout.asynchronous.host import Server
from qarl.weight_sync import update
update.PORTION = 0
generate = Server._generate
def noted(self):
    with open("during", "a") as file:
        print(int(self._host.busy), file=file)
    generate(self)
def receive(self, *arguments):
    Server._generate = noted
    try:
        real(self, *arguments)
    finally:
        Server._generate = generate
real, Server._receive = Server._receive, receive
"""
# Once the first 4 groups are complete, which a step takes, the sampler generates nothing until new weights arrive.
HOLD_FOR_WEIGHTS = """
import time
from collections import Counter
from qarl.rollout.asynchronous.host import Server
go_on, send, ended = Server._generate, Server._send_finished, Counter()
def held(self):
    if all(ended[number] == 4 for number in range(4)) and self._host.generation.version == 0:
        time.sleep(0.001)
    else:
        go_on(self)
def counted(self, finished):
    ended.update(group for group, *_ in finished)
    send(self, finished)
Server._generate, Server._send_finished = held, counted
"""
RARE_REWARD = """
def rare(completions, **columns):
    return [float(sum(map(ord, text)) % 6 == 0) for text in completions]
"""
# Responses of very different lengths.
UNEVEN = (
    "rollout.stop_token_ids=[70, 71, 72, 73, 74, 75, 76, 77, 78, 79]",
    "rollout.max_response_length=48",
    "rollout.max_num_seqs=8",
)


class Runs:
    """Runs of one configuration, each in its own directory."""

    def __init__(self, qarl: Qarl, model: Path, folder: Path) -> None:
        self.qarl, self.folder = qarl, folder
        data = settings(
            model,
            rollout={"max_response_length": 12},
            train={"steps": 4, "threads": 1},
            logging={"rollouts_every": 1, "samples": 0},
        )
        self.config = write_config(folder / "c.yaml", data)

    def train(self, name: str, *overrides: str, before: str = "", code: int = 0, **ahead: Any) -> list[dict[str, Any]]:
        """Return a run's metrics that do not depend on time. ahead: `rollout.async`; empty for a synchronous run."""
        given = [f"rollout.async={json.dumps(ahead)}"] if ahead else []
        run = [f"train.run_dir={self.folder / name}", *given, *overrides]
        done = self.qarl.run("train", self.config, *run, before=before, cwd=self.folder)
        assert done.code == code, done.err
        self.out, self.err = done.out, done.err
        return [] if code else repeatable(self.folder / name, BY_ENGINE)

    def train_on_ranks(self, name: str, *overrides: str, before: str = "", **more: Any) -> list[dict[str, Any]]:
        """Like `train`, on two ranks, each of which runs `before` first."""
        first = self.folder / "first.py"
        first.write_text(before)
        return self.train(name, *overrides, "--nproc", "2", before=forked_launch.before(first), **more)

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        """Return the master weights of the last checkpoint."""
        masters = load_checkpoint(self.folder / name / "checkpoints" / "latest", groups=["masters"])
        return dict(masters.tensors["masters"])

    def metrics(self, name: str) -> list[dict[str, Any]]:
        return recorded(self.folder / name)

    def most(self, name: str, metric: str) -> float:
        return max(row[metric] for row in self.metrics(name))

    def prompts(self, name: str) -> list[int]:
        """Return the ids of the prompts that the run learned from, in order."""
        files = sorted((self.folder / name / "rollouts").glob("*.jsonl"))
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        return [row["prompt_id"] for row in rows[::4]]

    def versions(self, name: str) -> set[int]:
        """Return the policy versions that sampled the tokens of a run."""
        steps = [read_rollouts(self.folder / name, step) for step in rollout_steps(self.folder / name)]
        mixed = {version for step in steps if step.versions for own in step.versions for version in own}
        return mixed | {step.version for step in steps if not step.versions}

    def stream(self, count: int) -> list[int]:
        """Return the ids of the first `count` prompts of the data, in the shuffled order."""
        config = Config.model_validate(yaml.safe_load(self.config.read_text()))
        prompts = [Prompt(i, [], "", {}) for i in range(1000)]  # as many as the task has
        return [prompt.id for prompt in PromptStream(prompts, config.train.seed, config.data.shuffle).next(count)]


@pytest.fixture(scope="module")
def runs(qarl, llama, tmp_path_factory) -> Runs:
    return Runs(qarl, llama, tmp_path_factory.mktemp("async"))


@pytest.fixture(scope="module")
def synchronous(runs) -> list[dict[str, Any]]:
    return runs.train("sync")


@pytest.fixture(scope="module")
def waiting(runs) -> list[dict[str, Any]]:
    """Metrics of a run whose sampler is two steps ahead, and finishes each response with one policy version."""
    return runs.train("waiting", max_staleness=2, in_flight="wait")


@pytest.fixture(scope="module")
def rounds(runs) -> tuple[str, ...]:
    """Dynamic sampling with a reward that half of the groups get for none of their responses."""
    (runs.folder / "rare.py").write_text(RARE_REWARD)
    functions = json.dumps([{"name": f"{runs.folder / 'rare.py'}:rare"}])
    return f"reward.functions={functions}", "rollout.dynamic_sampling={max_rounds: 4, oversample: 1.0}"


def exact(rows: list[dict[str, Any]]) -> bool:
    return all(row["mismatch/delta_abs_max"] == 0.0 for row in rows)


def test_staleness_0_gives_the_numbers_of_the_synchronous_run(runs, synchronous):
    assert runs.train("zero", before=START_SAMPLER, max_staleness=0) == synchronous
    assert [row["async/staleness_max"] for row in runs.metrics("zero")] == [0.0] * 4
    assert runs.prompts("zero") == runs.stream(16)


def test_waiting_runs_repeat_bit_for_bit_after_a_kill_of_either_process(runs, waiting):
    """The kill of the learner resumes from a checkpoint with responses of earlier versions in it.

    The run that is killed keeps earlier versions in host memory, the other on the device.
    """
    assert [row["async/staleness_max"] for row in runs.metrics("waiting")] == [0.0, 1.0, 2.0, 2.0]
    assert exact(waiting) and runs.prompts("waiting") == runs.stream(16)
    ahead = {"max_staleness": 2, "in_flight": "wait", "kept_versions": "host"}
    runs.train("killed", before=kill_sampler(2) + kill_run(3), code=-9, **ahead)
    assert "the sampler failed: its process was ended by SIGKILL" in runs.out and "restart 1 of 2" in runs.out
    assert repeatable(runs.folder / "killed", BY_ENGINE) == waiting[:3]
    assert runs.train("killed", **ahead) == waiting
    assert runs.prompts("killed") == runs.prompts("waiting")


def test_a_publish_while_the_next_sampler_gets_its_weights_changes_nothing(runs, waiting):
    """The transport of a sampler holds the tensors of one version at a time."""
    assert runs.train("at_publish", before=kill_sampler_at_publish(3), max_staleness=2, in_flight="wait") == waiting
    assert "restart 1 of 2" in runs.out


def test_responses_go_on_exactly_while_weights_arrive_and_a_kill_loses_and_repeats_no_prompt(runs):
    ahead = {"max_staleness": 4, "in_flight": "recompute_kv"}
    runs.train("flight", *UNEVEN, before=HOLD_FOR_WEIGHTS + SMALL_PORTIONS + kill_run(3), code=-9, **ahead)
    rows = runs.train("flight", *UNEVEN, **ahead)
    assert len(rows) == 4 and exact(rows)
    assert runs.prompts("flight") == runs.stream(16)
    assert "1" in (runs.folder / "during").read_text().split()
    assert runs.most("flight", "publish/pause_s") > 0 < runs.most("flight", "time/publish_receive_s")
    assert runs.most("flight", "async/staleness_max") <= 4 and runs.most("flight", "async/continued_frac") > 0


def test_a_stop_between_rounds_of_dynamic_sampling_repeats_no_prompt(runs, rounds):
    """The checkpoint is of the last finished step, but the queue then has groups of the interrupted one."""
    ahead = {"max_staleness": 0, "in_flight": "wait"}
    whole = runs.train("rounds_whole", *rounds, **ahead)
    counts = [int(row["sampling/rounds"]) for row in whole]
    step = next(i for i, count in enumerate(counts) if i and count > 1)
    runs.train("rounds_stopped", *rounds, before=stop_at_take(sum(counts[:step]) + 2), code=143, **ahead)
    assert len(runs.metrics("rounds_stopped")) == step
    assert runs.train("rounds_stopped", *rounds, **ahead) == whole
    assert runs.prompts("rounds_stopped") == runs.prompts("rounds_whole")


def test_a_sampler_that_gets_every_second_version_stays_within_the_staleness_bound(runs):
    """Across a kill of a sampler and of the run. Responses only have tokens of the versions that were sent."""
    ahead = {"max_staleness": 2, "publish_every": 2, "in_flight": "wait"}
    more = "train.steps=5", "logging.rollout_tensors=true"
    runs.train("second", *more, before=kill_sampler(2) + kill_run(3), code=-9, **ahead)
    assert exact(runs.train("second", *more, **ahead)) and runs.prompts("second") == runs.stream(20)
    assert [row["async/staleness_max"] for row in runs.metrics("second")] == [0.0, 1.0, 2.0, 1.0, 2.0]
    assert runs.versions("second") == {0, 4}  # two updates per step


def test_prompts_chosen_by_their_rewards_repeat_in_a_replay(runs):
    """Prompts are drawn before the last rewards are known, so a replay takes the recorded ones."""
    (runs.folder / "rare.py").write_text(RARE_REWARD)
    functions = json.dumps([{"name": f"{runs.folder / 'rare.py'}:rare"}])
    more = f"reward.functions={functions}", "data.task.size=6", "data.pass_rate=[0.1, 0.9]", "train.steps=6"
    ahead = {"max_staleness": 2, "in_flight": "wait"}
    rows = runs.train("rates", *more, **ahead)
    learned = runs.prompts("rates")
    assert exact(rows) and {learned.count(prompt) for prompt in range(6)} != {4}, "no prompt was skipped"
    assert runs.train("rates_again", *more, f"rollout.replay={runs.folder / 'rates'}", **ahead) == rows


def test_kept_keys_and_values_are_not_exact_and_nobody_is_warned(runs):
    ahead = {"max_staleness": 2, "in_flight": "keep_kv"}
    long = "rollout.max_response_length=60", "rollout.max_num_seqs=2", "train.steps=3"
    rows = runs.train("kept", *long, before=HOLD_FOR_WEIGHTS, **ahead)
    assert not exact(rows)
    assert "agree" not in runs.out.partition("mismatch/delta_abs_max")[0] and runs.err == ""


def test_partial_rollouts_are_learned_from_later_and_none_is_lost(runs):
    """Responses of very different lengths: a step takes complete groups, and the bound on staleness holds."""
    ahead = {"max_staleness": 3, "in_flight": "recompute_kv", "order": "finished"}
    more = *UNEVEN, "train.steps=6"
    runs.train("partial", *more, before=HOLD_FOR_WEIGHTS + kill_run(3), code=-9, **ahead)
    rows = runs.train("partial", *more, **ahead)
    learned, stream = runs.prompts("partial"), runs.stream(24)
    assert exact(rows) and sorted(learned) == sorted(stream)
    places = [stream.index(prompt) for prompt in learned]
    assert all(places[i] < places[i + 1] for i in range(23) if i % 4 < 3), "in a step: in the order of the data"
    assert runs.most("partial", "async/staleness_max") <= 3 and runs.most("partial", "async/continued_frac") > 0
    ahead["kept_versions"] = "host"
    again = "partial_again", *more, f"rollout.replay={runs.folder / 'partial'}"
    runs.train(*again, before=kill_run(3), code=-9, **ahead)  # the checkpoint has the versions that step 3 needs
    assert runs.train(*again, **ahead) == rows


def test_a_step_takes_the_first_groups_of_a_wave_and_cancels_the_rest(runs):
    """After a kill of the sampler or of the run, too."""
    ahead = {"max_staleness": 2, "in_flight": "recompute_kv", "oversample": 1.5}
    more = *UNEVEN, "train.steps=6"  # so that the resumed run gives the sampler further prompts
    runs.train("waves", *more, before=kill_run(3), code=-9, **ahead)
    rows = runs.train("waves", *more, before=kill_sampler(2), **ahead)
    assert "restart 1 of 2" in runs.out
    assert exact(rows) and runs.most("waves", "async/staleness_max") <= 2
    started, learned = runs.stream(36), runs.prompts("waves")
    assert len(learned) == 24
    for step in range(6):
        taken, wave = learned[4 * step : 4 * step + 4], started[6 * step : 6 * step + 6]
        assert taken == [prompt for prompt in wave if prompt in taken], "in the order of the data, each once"
    assert runs.most("waves", "async/cancelled_frac") > 0
    assert learned != [p for i in range(6) for p in started[6 * i : 6 * i + 4]]


def test_the_newest_policy_as_proximal_one_leaves_staleness_to_the_correction(runs):
    rows = runs.train("newest", "train.steps=2", max_staleness=1, proximal="newest")
    assert rows[0]["mismatch/delta_abs_max"] == 0.0 < rows[1]["mismatch/delta_abs_max"]


def test_verifying_a_share_of_the_log_probs_changes_nothing_that_is_learned(runs, waiting):
    """Entropy is of the responses that the learner ran at their version."""
    few = runs.train("few", max_staleness=2, in_flight="wait", verify_frac=0.25)
    for row, other in zip(few, waiting, strict=True):
        assert {k: v for k, v in row.items() if "entropy" not in k} == {
            k: v for k, v in other.items() if "entropy" not in k
        }


def test_a_sampler_that_fails_again_and_again_ends_the_run_in_one_line(runs):
    ahead = {"max_staleness": 1, "max_restarts": 1, "in_flight": "recompute_kv"}
    runs.train("failing", before=kill_sampler(None), code=2, **ahead)
    last = runs.err.strip().splitlines()[-1]
    assert "rollout.async: the sampler failed: its process was ended by SIGKILL" in last
    assert "restarted 1 times already (rollout.async.max_restarts)" in last
    saved = [row["step"] for row in runs.metrics("failing")]
    assert (runs.folder / "failing" / "checkpoints" / f"{saved[-1]:06d}").is_dir(), "finished steps are saved"


def test_a_synchronous_run_does_not_drop_what_was_sampled_ahead(runs, waiting):
    runs.train("switch", f"checkpoint.resume={runs.folder / 'waiting' / 'checkpoints' / '000002'}", code=2)
    assert "prompts were sampled ahead of the learner" in runs.err and "set rollout.async as it was" in runs.err


@pytest.mark.parametrize(
    ("ahead", "override", "fix"),
    [
        ({}, "rollout.temperature=0.5", "set rollout.temperature: 1.0"),
        ({"oversample": 2.0}, "train.steps=4", "set rollout.async.oversample: 1.0"),
        ({}, "data.system_prompt=Be brief.", r"prompt \d+ of a saved response changed; restore the data"),
    ],
)
def test_responses_sampled_ahead_are_not_learned_from_with_other_settings(runs, waiting, ahead, override, fix):
    """Their log-probs would be of another distribution or prompt, their age beyond the bound, or their wave endless."""
    start = f"checkpoint.resume={runs.folder / 'waiting' / 'checkpoints' / '000002'}", "checkpoint.allow_changed=[data]"
    runs.train("other", *start, override, code=2, **{"max_staleness": 2, "in_flight": "wait", **ahead})
    assert re.search(fix, runs.err)


def test_a_replay_names_what_does_not_fit(runs, synchronous):
    recorded = f"rollout.replay={runs.folder / 'sync'}"
    assert runs.train("replayed", recorded) == synchronous
    assert not any("throughput/rollout_tokens_per_s" in row for row in runs.metrics("replayed")), "nothing is sampled"
    runs.train("longer", recorded, "train.steps=5", code=2)
    assert "has no rollouts of step 5" in runs.err
    runs.train("other_seed", recorded, "train.seed=5", code=2)
    assert "has other prompts than this run" in runs.err


# --- two ranks, each with a sampler


def test_two_waiting_ranks_repeat_bit_for_bit_after_a_kill_of_a_sampler_and_a_rank(runs, rounds):
    ahead = {"max_staleness": 2, "in_flight": "wait"}
    whole = runs.train_on_ranks("ranks_whole", *rounds, **ahead)
    assert max(row["sampling/rounds"] for row in whole) > 1
    assert exact(whole) and 0 < runs.most("ranks_whole", "async/staleness_max") <= 2
    before = PIDS + on_rank(1, kill_sampler(2) + kill_at_take(6))
    runs.train_on_ranks("ranks_killed", *rounds, before=before, code=137, **ahead)
    assert "rank 1" in runs.err.strip().splitlines()[-1]
    killed = runs.metrics("ranks_killed")
    assert len(killed) < 4 and killed[-1]["async/restarts"] == 1.0
    pids = {int(pid) for pid in (runs.folder / "pids").read_text().split()}
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=5)
    assert len(pids) == 3 and not any(map(psutil.pid_exists, pids)), "samplers end with their ranks"
    assert runs.train_on_ranks("ranks_killed", *rounds, **ahead) == whole
    weights = runs.weights("ranks_whole")
    assert all(torch.equal(tensor, weights[key]) for key, tensor in runs.weights("ranks_killed").items())


def test_partial_rollouts_of_two_ranks_continue_on_one(runs):
    """A step takes complete groups of either rank, and the bound on staleness holds. No prompt is lost or repeated."""
    ahead = {"max_staleness": 3, "in_flight": "recompute_kv", "order": "finished"}
    more = *UNEVEN, "train.steps=6"
    runs.train_on_ranks("ranks_partial", *more, before=on_rank(1, kill_at_take(4)), code=137, **ahead)
    rows = runs.train("ranks_partial", *more, **ahead)
    assert "the number of ranks changed" in runs.out
    assert exact(rows) and sorted(runs.prompts("ranks_partial")) == sorted(runs.stream(24))
    assert runs.most("ranks_partial", "async/staleness_max") <= 3
