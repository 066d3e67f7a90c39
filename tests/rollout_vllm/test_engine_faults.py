"""The vLLM engine over samplers that fail: restarts, their limit, and what a publish sends. Without vLLM."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_sampler
import pytest
import torch
from tiny_runs import settings

from qarl.config import Config
from qarl.errors import UserError
from qarl.memory.sizes import decide_sizes
from qarl.policy.load import load_model, load_tokenizer
from qarl.rollout.engine import SamplingParams
from qarl.rollout.vllm.engine import MARGIN, VLLMEngine
from qarl.rollout.vllm.process import SamplerError
from qarl.training.setup import build_policy
from qarl.types import Prompt, Rollout
from qarl.weight_sync.fingerprints import PublishError
from qarl.weight_sync.sender import WeightSender

SAMPLING = SamplingParams(2, 1, 8, stop_token_ids=frozenset({1}))
PROMPTS = [Prompt(i, [5 + i, 70, 90 + i], "", {}) for i in range(6)]
MEANT = "above the mean of 0.2500 that the first load allows: vLLM does not use the weights that it was sent"


class Case:
    """A policy, its engine, the troubles of the fake sampler, and the lines that the engine reported."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder, self.said = model, folder, []
        self.troubles = folder / "troubles"
        self.engine: VLLMEngine | None = None
        self.update_bytes: int | None = None

    def make(self, *troubles: str, exact: bool = False, **vllm) -> VLLMEngine:
        self.troubles.write_text("\n".join(troubles))
        section = {"engine": "vllm", "vllm": {"args": {"troubles": str(self.troubles)}, **vllm}}
        config = decide_sizes(Config.model_validate(settings(self.model, rollout=section)), "cpu")
        self.policy = build_policy(config, load_model(config.model), torch.device("cpu"))
        sampler, tokenizer, say = self.policy.sampler, load_tokenizer(config.model), self.said.append
        weights = WeightSender(sampler.layout, tokenizer, sampler, [[5, 70, 90], [6, 71]], say, exact)
        more = {"update_bytes": self.update_bytes}
        self.engine = VLLMEngine(config, sampler.layout, tokenizer, weights, self.folder, say, **more)
        return self.engine

    def publish(self) -> None:
        self.engine.publish(self.policy.current)

    def draw(self, progress: Callable[[int, int], None] = lambda responses, tokens: None) -> list[Rollout]:
        return self.engine.generate(PROMPTS, SAMPLING, self.policy.version, progress)

    @torch.no_grad()
    def learn(self, version: int) -> None:
        """Negate one matrix of the policy and give the result this version."""
        dict(self.policy.named_parameters())["model.layers.1.mlp.up_proj.weight"].mul_(-1)
        self.policy.refresh(version)

    @property
    def pids(self) -> list[int]:
        return fake_sampler.pids(self.troubles)


@pytest.fixture
def case(even_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    """A `Case`. Checks afterwards that no process, memory file or checkpoint is left."""
    fake_sampler.install(monkeypatch.setattr)
    open_before = fake_sampler.memory_files()
    made = Case(even_model, tmp_path)
    yield made
    made.engine.close()
    assert [pid for pid in made.pids if fake_sampler.alive(pid)] == []
    assert fake_sampler.memory_files() == open_before
    assert not (tmp_path / "sampler").exists()


@pytest.fixture
def undisturbed(case) -> list[Rollout]:
    case.make()
    case.publish()
    rollouts = case.draw()
    case.engine.close()
    return rollouts


def test_responses_come_in_order_with_their_texts(undisturbed, case) -> None:
    assert [(r.prompt_id, r.sample) for r in undisturbed] == [(i, sample) for i in range(6) for sample in range(2)]
    for rollout in undisturbed:
        stopped = rollout.finish_reason == "stop"
        assert stopped == (rollout.token_ids[-1] == 1)
        said = rollout.token_ids[:-1] if stopped else rollout.token_ids
        assert rollout.text == case.engine.tokenizer.decode(said)


def test_a_repeated_prompt_continues_its_samples(case) -> None:
    engine = case.make()
    case.publish()
    wanted = engine.generate([PROMPTS[0]], replace(SAMPLING, n=4), 0)
    assert engine.generate([PROMPTS[0], PROMPTS[0]], SAMPLING, 0) == wanted


def test_an_exact_sampler_with_other_bits_is_reported_once(case) -> None:
    case.make(exact=True)
    case.publish()
    case.learn(1)
    case.publish()
    (line,) = case.said
    assert line.startswith("rollout: the canary's log-probs differ by mean 0.")
    assert line.endswith("should be bit-identical; run qarl verify-exact to find out where they differ")


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("kill", "its process was ended by SIGKILL, perhaps for lack of memory"),
        ("fail", "RuntimeError: out of blocks"),
        ("hang", "it gave no sign of life for 1 s (rollout.vllm.timeout_s)"),
    ],
)
def test_a_sampler_that_fails_while_it_generates_is_replaced_and_generates_the_same(
    undisturbed, case, monkeypatch, trouble, said
) -> None:
    fake_sampler.limit_only_hangs(case.folder, monkeypatch.setattr)
    case.make(f"generate {trouble}", timeout_s=1)
    case.publish()
    assert case.draw() == undisturbed
    see = f"; see {case.folder / 'sampler.log'}" if trouble == "fail" else ""  # the others print nothing
    assert case.said == [f"vLLM failed: {said}; restart 1 of 2{see}"]
    assert case.engine.restarts == 1 and len(case.pids) == 3


@pytest.mark.parametrize("trouble", ["publish kill", "sleep frees 1000\nwake kill"])
def test_a_sampler_that_fails_in_or_before_a_publish_is_replaced_at_the_new_version(case, monkeypatch, trouble) -> None:
    monkeypatch.setattr("qarl.rollout.shared.has_headroom", lambda device, needed: True)
    case.update_bytes = 500
    case.make(trouble)
    case.publish()
    if trouble.startswith("sleep"):
        case.engine.sleep()
        case.engine.wake()
    case.learn(1)
    case.publish()
    assert case.engine.version == 1 and case.engine.restarts == 1 and len(case.pids) == 2
    assert len(case.draw()) == 12  # from version 1, which the new sampler verified at its start


@pytest.fixture
def asleep(case, monkeypatch) -> Callable[..., VLLMEngine]:
    """made(*troubles, free, ...) -> an engine whose sampler freed 1,000 bytes to sleep. free: Free bytes of the GPU."""

    def made(*troubles: str, free: int, update_bytes: int | None = 500, **vllm: Any) -> VLLMEngine:
        monkeypatch.setattr("qarl.rollout.shared.has_headroom", lambda device, needed: free >= needed)
        case.update_bytes = update_bytes
        engine = case.make("sleep frees 1000", *troubles, **vllm)
        case.publish()
        engine.sleep()
        assert engine.metrics["memory/sampler_freed_gib"] == 1000 / 2**30
        assert 0 < engine.metrics["time/sampler_sleep_s"] < 30
        return engine

    return made


@pytest.mark.parametrize(
    ("vllm", "level"),
    [({"publish": "full"}, 2), ({"publish": "delta"}, 1), ({"publish": "delta", "sleep_level": 0}, 0)],
    ids=str,
)
def test_sleep_frees_the_weights_unless_deltas_need_them(case, asleep, vllm, level) -> None:
    engine = asleep(free=0, **vllm)
    assert case.troubles.with_suffix(".sleeps").read_text() == f"{level}\n"
    assert engine.weights.holds == (level < 2)
    case.learn(1)
    case.publish()
    assert engine.metrics["publish/sent_frac"] == 1.0 if level == 2 else engine.metrics["publish/sent_frac"] < 1.0
    assert len(case.draw()) == 12


def wakes(case: Case) -> int:
    return len(case.troubles.with_suffix(".wakes").read_text().splitlines())


def test_a_sampler_wakes_during_the_learners_update_before_the_publish(case, asleep) -> None:
    engine = asleep(free=1500 + MARGIN)
    engine.wake()
    engine.wake()  # once more, after the update
    assert engine._waking
    case.learn(1)
    case.publish()
    assert wakes(case) == 1 and engine.version == 1 and len(case.draw()) == 12
    assert engine.metrics["time/sampler_wake_s"] >= 0


@pytest.mark.parametrize("update_bytes", [500, None], ids=["no room", "nothing known"])
def test_without_headroom_a_sampler_wakes_for_the_publish(case, asleep, update_bytes) -> None:
    engine = asleep(free=1499 + MARGIN, update_bytes=update_bytes)
    engine.wake()
    assert not engine._waking
    case.learn(1)
    case.publish()
    assert wakes(case) == 1 and len(case.draw()) == 12


def test_failures_beyond_the_limit_end_the_run_in_one_line(case) -> None:
    case.make("generate exit", "generate exit", max_restarts=1)
    case.publish()
    said = r"^rollout\.vllm: .* ended with exit code 3; restarted 1 times already \(rollout\.vllm\.max_restarts\)$"
    with pytest.raises(SamplerError, match=said):
        case.draw()


@pytest.mark.parametrize(
    ("troubles", "starts", "said"),
    [
        (["start fail"], 1, r"vLLM did not start: RuntimeError: out of blocks; see .*sampler\.log$"),
        (["start measure"] * 2, 2, r"vLLM did not start: AssertionError: Error in memory profiling"),
    ],
)
def test_a_first_start_that_fails_is_retried_only_if_it_measured_the_memory_of_others(
    case, troubles, starts, said
) -> None:
    case.make(*troubles, max_restarts=1)
    with pytest.raises(SamplerError, match=said):
        case.publish()
    assert len(case.pids) == starts


def test_a_restarted_sampler_that_computes_something_else_ends_the_run(case) -> None:
    case.make("generate kill", "start lie")
    case.publish()
    with pytest.raises(PublishError, match=r"publish of version 0: .* off by mean 1\.0000"):
        case.draw()


def test_a_delta_that_the_canary_rejects_is_sent_again_in_full_and_later_deltas_work(case) -> None:
    case.make("publish lie", publish="delta")
    case.publish()
    case.learn(1)
    case.publish()
    assert case.said == [
        f"publish of version 1: vLLM's log-probs on the canary are off by mean 1.0000, max 1.0000, {MEANT}; "
        "sending everything"
    ]
    assert case.engine.version == 1 and case.engine.metrics["publish/sent_frac"] == 1.0
    case.learn(2)
    case.publish()
    assert case.engine.version == 2 and case.engine.metrics["publish/sent_frac"] < 0.2


def test_a_full_publish_that_the_canary_rejects_ends_the_run(case) -> None:
    case.make("publish lie", publish="full")
    case.publish()
    case.learn(1)
    with pytest.raises(PublishError, match=r"off by mean 1\.0000"):
        case.publish()
    assert not fake_sampler.alive(case.pids[0])  # what it holds is unknown
    with pytest.raises(PublishError, match="stale"):
        case.draw()


def test_an_interrupt_leaves_the_engine_usable(undisturbed, case) -> None:
    class Stop(BaseException):
        pass

    def stop(responses: int, tokens: int) -> None:
        raise Stop

    case.make("generate slow")
    case.publish()
    with pytest.raises(Stop):
        case.draw(stop)
    assert case.draw() == undisturbed
    assert case.engine.restarts == 0


def test_prompts_that_do_not_fit_and_versions_that_were_not_published_are_refused(case) -> None:
    case.make()
    case.publish()
    with pytest.raises(UserError, match=r"rollout\.max_response_length"):
        case.engine.generate([Prompt(0, [5] * 510, "", {})], SAMPLING, 0)
    case.learn(1)
    with pytest.raises(PublishError, match="stale"):
        case.draw()
