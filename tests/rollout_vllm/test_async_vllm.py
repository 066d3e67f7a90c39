"""vLLM as the sampler of asynchronous rollouts: versions of tokens, continued responses, kills, exactness.

The sampler is `fake_sampler` unless a test says otherwise.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_sampler
import pytest
from fake_sampler import EVEN, FakeHost
from needs_vllm import needs_cpu_build
from run_faults import BY_ENGINE, kill_run, kill_sampler, recorded, repeatable
from tiny_models import tiny_settings
from tiny_runs import Qarl, settings, write_config

from qarl.config import Config
from qarl.policy.load import load_tokenizer
from qarl.rollout.asynchronous.vllm_host import VLLMHost
from qarl.rollout.engine import SamplingParams, request_seed
from qarl.rollout.vllm.settings import AsyncSettings, Group, Request, Response
from qarl.weight_sync.update import WeightUpdate

SAMPLING = SamplingParams(n=2, seed=7, max_response_length=30, stop_token_ids=frozenset({2}))
PROMPT = [5, 70, 90]


class Scripted(FakeHost):
    """Answers a request with the tokens of its prompt in `answers`, and records the requests."""

    answers: dict[tuple[int, ...], list[int]]
    requests: list[tuple[str, Request, SamplingParams]]

    def add(self, name: str, request: Request, sampling: SamplingParams) -> None:
        self.requests.append((name, request, sampling))
        tokens = self.answers[tuple(request.token_ids)]
        self._streams[name] = Response(tokens, [EVEN] * len(tokens), "length", None), 0


@pytest.fixture
def made(tiny_model, tmp_path):
    """made(in_flight, sampling) -> a scripted vLLM, and the `VLLMHost` that runs it."""

    def make(in_flight: str = "recompute_kv", sampling: SamplingParams = SAMPLING) -> tuple[Scripted, VLLMHost]:
        (tmp_path / "troubles").write_text("")
        host = Scripted(fake_sampler.settings(tmp_path), {})
        host.answers, host.requests = {}, []
        rollout = {"engine": "vllm", "numerics": "fast", "async": {"in_flight": in_flight}}
        config = Config.model_validate(tiny_settings(tiny_model("llama"), rollout=rollout)).to_yaml()
        return host, VLLMHost(host, AsyncSettings(config, "cpu", 64, 64, 8, sampling, 1))

    return make


def publish(served: VLLMHost, version: int) -> list[tuple[Any, ...]]:
    """Publish as `Server` does: finish scheduled batches, load, score. Returns the responses that ended."""
    ended = served.settle()
    update = WeightUpdate(version, [None], {}, [[1, 2, 3]])
    served.publish(update, served.receive(update, [], pytest.fail))
    served.score(update.canary, pytest.fail)
    return ended


def to_the_end(served: VLLMHost) -> list[tuple[Any, ...]]:
    ended = []
    while served.busy:
        ended += served.step()
    return ended


@pytest.mark.parametrize("in_flight", ["recompute_kv", "keep_kv"])
def test_each_token_has_the_version_that_sampled_it(made, in_flight):
    """The step that scores the canary samples with the new weights already."""
    host, served = made(in_flight)
    host.answers = {(*PROMPT,): list(range(10, 20)), (6,): [30, 31]}
    publish(served, 4)
    served.add([Group(3, 0, PROMPT, 7, [0])])
    for _ in range(3):
        assert served.step() == []
    publish(served, 5)
    served.add([Group(8, 1, [6], 7, [1])])
    (short,) = served.step() + served.step()
    assert short[:2] == (8, 1) and short[6] == [5, 5]
    publish(served, 6)
    (whole,) = to_the_end(served)
    assert whole[:3] == (3, 0, list(range(10, 20))) and whole[6] == [4] * 3 + [5] * 3 + [6] * 4
    assert host.publishes == [(version, in_flight) for version in (4, 5, 6)]


def test_unfinished_responses_continue_in_another_process_from_their_tokens(made):
    host, served = made()
    host.answers = {(*PROMPT,): list(range(10, 40))}
    publish(served, 1)
    served.add([Group(0, 9, PROMPT, 7, [0, 1])])
    served.step()
    publish(served, 2)
    found = served.partials()
    assert found == [(0, sample, [10, 11], [EVEN] * 2, [1, 2]) for sample in (0, 1)]
    own = {sample: tuple(rest) for _, sample, *rest in found}

    other, served = made()
    other.answers = {(*PROMPT, 10, 11): [50, 51, 52]}
    publish(served, 3)
    served.add([Group(0, 9, PROMPT, 7, [0, 1], own)])
    assert served.partials() == found, "nothing was sampled yet, and nothing is lost"
    assert [sampling.max_response_length for *_, sampling in other.requests] == [28, 28]
    seeds = {request.seed for _, request, _ in [*host.requests, *other.requests]}
    assert len(seeds) == 4 and request_seed(7, 9, 0) in seeds, "a continued response has random numbers of its own"
    first, _ = to_the_end(served)
    assert first[2] == [10, 11, 50, 51, 52] and first[6] == [1, 2, 3, 3, 3] and len(first[3]) == 5


def test_cancelled_groups_end_and_the_others_continue(made):
    host, served = made()
    host.answers = {(*PROMPT,): list(range(10, 20)), (6,): [30, 31, 32]}
    publish(served, 1)
    served.add([Group(0, 9, PROMPT, 7, [0, 1]), Group(1, 8, [6], 7, [0])])
    served.step()
    served.cancel([0, 5])
    (left,) = to_the_end(served)
    assert left[:3] == (1, 0, [30, 31, 32]) and not served.busy


@pytest.mark.parametrize("cut", [1, 3])
def test_a_stop_string_may_begin_in_the_tokens_that_another_process_sampled(made, tiny_model, cut):
    """vLLM sees only what it samples itself, so it goes on past a stop string that another process began."""
    stops = replace(SAMPLING, stop=("stop",))
    encode = load_tokenizer(Config.model_validate(tiny_settings(tiny_model("llama"))).model).encode
    host, served = made("recompute_kv", stops)
    tokens = encode("a stop b", add_special_tokens=False)
    assert len(tokens) == 8
    host.answers = {(*PROMPT, *tokens[:cut]): tokens[cut:]}
    publish(served, 1)
    before = tokens[:cut], [EVEN] * cut, [0] * cut
    served.add([Group(0, 0, PROMPT, 7, [0], {0: before})])
    (found,) = to_the_end(served)
    assert found[2] == tokens[:6] and found[4:6] == ("stop", "a ") and found[6] == [0] * cut + [1] * (6 - cut)


# --- whole runs ------------------------------------------------------------------------------------------------------

INSTALL = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import fake_sampler; fake_sampler.install()\n"
# On a CPU vLLM turns it off. With it, as on a GPU, a batch runs ahead of the tokens that vLLM's host has seen.
ASYNC_SCHEDULING = """
from vllm.platforms.cpu import CpuPlatform
real_check = CpuPlatform.check_and_update_config.__func__
def check(cls, vllm_config):
    real_check(cls, vllm_config)
    vllm_config.scheduler_config.async_scheduling = True
CpuPlatform.check_and_update_config = classmethod(check)
"""


class Runs:
    """Runs of one configuration. before: Python that each of them runs first."""

    def __init__(self, qarl: Qarl, folder: Path, data: dict[str, Any], before: str = "") -> None:
        self.qarl, self.folder, self.before = qarl, folder, before
        self.config = write_config(folder / "c.yaml", data)

    def train(self, name: str, *overrides: str, before: str = "", code: int = 0, **ahead: Any) -> list[dict[str, Any]]:
        """The metrics of a run. ahead: `rollout.async`; nothing: synchronous."""
        given = [f"rollout.async={json.dumps(ahead)}"] if ahead else []
        run = [f"train.run_dir={self.folder / name}", *given, *overrides]
        done = self.qarl.run("train", self.config, *run, before=self.before + before)
        assert done.code == code, done.err
        self.out = done.out
        return recorded(self.folder / name)

    def repeatable(self, name: str) -> list[dict[str, Any]]:
        return repeatable(self.folder / name, BY_ENGINE)

    def prompts(self, name: str) -> list[int]:
        """Ids of the prompts that the run learned from, in order."""
        files = sorted((self.folder / name / "rollouts").glob("*.jsonl"))
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        return [row["prompt_id"] for row in rows[::4]]


@pytest.fixture(scope="module")
def fakes(qarl, even_model, tmp_path_factory) -> Runs:
    """Runs with `fake_sampler` in which a response has up to 24 tokens."""
    folder = tmp_path_factory.mktemp("fakes")
    (folder / "troubles").write_text("")
    rollout = {"engine": "vllm", "numerics": "fast", "max_response_length": 24}
    rollout |= {"stop_token_ids": [2], "ignore_eos": True, "vllm": {"args": {"troubles": str(folder / "troubles")}}}
    data = settings(even_model, rollout=rollout, optim={"lr": 1e-5}, train={"steps": 4, "threads": 1})
    return Runs(qarl, folder, data, INSTALL)


@pytest.fixture(scope="module")
def whole(fakes) -> list[dict[str, Any]]:
    return fakes.train("whole", max_staleness=1, in_flight="wait")


@pytest.mark.slow
def test_waiting_runs_repeat_after_a_kill_of_the_sampler(fakes, whole):
    ahead = {"max_staleness": 1, "in_flight": "wait"}
    assert [row["async/staleness_max"] for row in whole] == [0.0, 1.0, 1.0, 1.0]
    fakes.train("killed", before=kill_sampler(2), **ahead)
    assert fakes.repeatable("killed") == fakes.repeatable("whole")
    assert "the sampler failed: its process was ended by SIGKILL" in fakes.out and "restart 1 of 2" in fakes.out
    assert not (fakes.folder / "killed" / "sampler").exists(), "the checkpoint that vLLM loads is removed"


@pytest.mark.slow
def test_staleness_0_gives_the_numbers_of_the_synchronous_run(fakes):
    fakes.train("zero", max_staleness=0)
    fakes.train("sync")
    assert fakes.repeatable("zero") == fakes.repeatable("sync")


@pytest.mark.slow
def test_a_killed_run_loses_and_repeats_no_prompt(fakes, whole):
    (fakes.folder / "troubles").write_text("step slow")
    ahead = {"max_staleness": 2, "in_flight": "recompute_kv", "order": "prompts"}
    fakes.train("continued", before=kill_run(3), code=-9, **ahead)
    rows = fakes.train("continued", **ahead)
    assert len(rows) == 4 and max(row["async/staleness_max"] for row in rows) <= 2
    assert max(row["async/continued_frac"] for row in rows) > 0, "no response saw new weights"
    assert fakes.prompts("continued") == fakes.prompts("whole")


@needs_cpu_build
@pytest.mark.slow
def test_weights_that_change_in_flight_stay_exact_in_real_vllm(qarl_with_vllm, tiny_model, tmp_path):
    """A token with a wrong version, or keys of earlier weights, would show as a mismatch."""
    # Long responses, two at a time, so that weights arrive while some are in progress.
    rollout = {"engine": "vllm", "min_p": 0.01, "max_response_length": 96, "max_num_seqs": 2, "n": 2}
    data = settings(tiny_model("qwen3"), rollout=rollout, train={"steps": 3, "threads": 1}, checkpoint={"every": 100})
    real = Runs(qarl_with_vllm, tmp_path, data, ASYNC_SCHEDULING)
    rows = real.train("flight", max_staleness=2, in_flight="recompute_kv", oversample=1.5)
    assert max(row["async/cancelled_frac"] for row in rows) > 0, "no response was cancelled"
    assert all(row["mismatch/delta_abs_max"] == row["publish/canary_abs_max"] == 0.0 for row in rows)
    assert max(row["async/continued_frac"] for row in rows) > 0, "no response saw new weights"
