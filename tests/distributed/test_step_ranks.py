"""A step on several ranks: the same rollouts, rewards, batch and totals as on one."""

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from replicated import ReplicatedUpdates, run_threads
from reward_limits import limit_only
from tiny_runs import settings

from qarl.batch.batch import Batch, Part
from qarl.batch.observer import Observer, Observers
from qarl.config import Config
from qarl.config.reward import RewardConfig
from qarl.diagnostics.probe import Probe
from qarl.distributed.ranks import OtherRankFailed, Ranks, SingleProcess
from qarl.errors import UserError
from qarl.memory.sizes import decide_sizes
from qarl.objectives.common import TokenLogProbs
from qarl.policy.load import load_model, load_tokenizer
from qarl.rewards import RewardPool, RewardResult
from qarl.rewards.batch import Share
from qarl.rollout.native.engine import NativeEngine
from qarl.training import step
from qarl.training.learner import Learner
from qarl.training.setup import build_policy, build_sampling
from qarl.training.updates import LocalUpdates
from qarl.types import Prompt, Rollout

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [
    Prompt(i % 4, [5 + i % 4, 70, 90 + i % 4], f"prompt {i % 4}", {"n": i % 4}) for i in range(5)
]  # one is twice
LOADING = threading.Lock()  # transformers' is of one thread at a time


class Rewards:
    """A reward computed from prompt and tokens."""

    def score(
        self, texts: list[str], asked: list[str], columns: dict, ids: list[list[int]], share: Share | None = None
    ) -> RewardResult:
        numbers = columns["n"] if ids else []  # a rank without prompts knows no columns
        assert [f"prompt {n}" for n in numbers] == asked and len(texts) == len(ids) == len(asked)
        assert share is None or not ids or share.total >= share.first + len(ids)
        total = [float((sum(tokens) + n) % 7) / 3 for tokens, n in zip(ids, numbers, strict=True)]
        return RewardResult(total, {"own": total}, {"own": 0}, [])


class Watching(Observer):
    """Keeps what observers are told; `progressed`: responses of the current phase."""

    def __init__(self) -> None:
        self.rollouts: list[Rollout] = []
        self.progressed = 0
        self.norms: list[float] = []

    def progress(self, responses: int) -> None:
        self.progressed += responses

    def sampled(self, metrics: dict[str, float]) -> None:
        self.sampled_metrics = metrics

    def scored(self, prompts: list[Prompt], rollouts: list[Rollout], scores: RewardResult) -> None:
        self.rollouts, self.scores = rollouts, scores
        self.progressed = 0

    def update(self, grad_norm: float) -> None:
        self.norms.append(grad_norm)

    def learned(self, batch: Batch, metrics: dict[str, float]) -> None:
        self.batch, self.metrics = batch, metrics


def make(path, ranks: Ranks, prompts: list[Prompt] = PROMPTS, **sections: dict[str, Any]) -> SimpleNamespace:
    """The parts of a run on `ranks`, each of which holds all masters."""
    sections.setdefault("train", {})
    sections["train"] = {"prompts_per_step": len(prompts), "minibatch_size": 10, **sections["train"]}
    config = decide_sizes(Config.model_validate(settings(path, **sections)), "cpu")
    with LOADING:
        policy = build_policy(config, load_model(config.model), torch.device("cpu"))
        tokenizer = load_tokenizer(config.model)
    sampling = build_sampling(config, policy, tokenizer)
    updates = LocalUpdates(policy, config) if ranks.count == 1 else ReplicatedUpdates(policy, config, ranks)
    learner = Learner(policy, updates, config, sampling.truncation, ranks)
    if learner.objective.needs.reference:
        policy.keep_reference()
    engine = NativeEngine(policy.sampler, tokenizer, config.rollout)
    engine.publish(policy.current)
    stream = SimpleNamespace(next=lambda count: prompts[:count], record_rewards=lambda asked, rewards: None)
    return SimpleNamespace(
        config=config,
        policy=policy,
        updates=updates,
        learner=learner,
        engine=engine,
        sampling=sampling,
        stream=stream,
        rewards=Rewards(),
        metrics={},
        source=None,
    )


def take(path, ranks: Ranks, prompts: list[Prompt] = PROMPTS, steps: int = 1, **sections: Any) -> tuple[Any, Watching]:
    run = make(path, ranks, prompts, **sections)
    for number in range(steps):
        watching = Watching()
        step.rl_step(run.config, run, number, Observers([watching]))
        assert watching.progressed == run.learner.forwards(watching.batch, number)
    return run, watching


def assert_same_batch(one: Batch, other: Batch) -> None:
    assert all(getattr(one, name) == getattr(other, name) for name in ("version", "prompts", "responses", "groups"))
    assert torch.equal(one.advantages, other.advantages)
    for name in ("logp_sampler", "logp_old"):
        assert torch.equal(getattr(one.whole(), name), getattr(other.whole(), name)), name


EXACT = ("policy/entropy_tokens", "policy/zero_advantage_frac", "policy/version", "policy/skipped_steps", "optim/lr")
SHADOWED = {"quant": {"learner": "full_precision"}}
TWICE = {"train": {"epochs": 2}}
# Ranks, tokens per micro-batch, further sections.
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "large micro-batches": (2, 4096, TWICE),
    "replayed sets": (3, 24, TWICE | {"rollout": {"top_p": 0.8}, "objective": {"truncation_set": "replay"}}),
    "constants": (2, 24, SHADOWED | {"objective": {"name": "dapo", "loss": "detach_center", "ratio": "shadow"}}),
    "reference": (2, 24, {"objective": {"kl_coef": 0.5}}),
    "retained": (2, 24, {"objective": {"dvp_rho": 0.3}}),
    "entropy": (2, 24, {"objective": {"entropy_coef": 0.1}}),
    "ranks without prompts and micro-batches": (3, 4096, {"rollout": {"n": 2}, "train": {"minibatch_size": 2}}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_same_on_any_number_of_ranks(llama, case):
    count, tokens, more = CASES[case]
    few = "without prompts" in case
    # In 16 bits the backward rounds what responses share of a prompt, which depends on the micro-batches.
    sections = {"model": {"dtype": "float32"}, **more, "train": {"micro_batch_tokens": tokens, **more.get("train", {})}}
    if "objective" in more:
        sections["objective"] = {"name": "grpo", **more["objective"]}
    prompts = PROMPTS[:2] if few else PROMPTS
    _, alone = take(llama, SingleProcess(), prompts, **sections)
    found = run_threads(count, lambda ranks: take(llama, ranks, prompts, **sections))
    for run, watching in found:
        assert watching.rollouts == alone.rollouts and watching.scores == alone.scores
        assert_same_batch(watching.batch, alone.batch)
        assert watching.norms == found[0][1].norms and len(watching.norms) == len(alone.norms)
        assert watching.norms[0] == pytest.approx(alone.norms[0], rel=1e-6)
        assert watching.metrics == found[0][1].metrics and watching.metrics.keys() == alone.metrics.keys()
        assert all(watching.metrics[k] == alone.metrics[k] for k in EXACT if k in alone.metrics)
        assert watching.metrics["policy/entropy"] == pytest.approx(alone.metrics["policy/entropy"], rel=1e-12)
        assert watching.metrics == pytest.approx(alone.metrics, rel=2e-2, abs=1e-3)
        if case == "replayed sets":
            sets = (x.batch.kept.read(x.batch.whole()) for x in (watching, alone))
            assert all(torch.equal(one, other) for one, other in zip(*sets, strict=True))
            assert watching.metrics["policy/outside_frac"] == 0.0
        if case == "reference":
            references = (x.batch.logp_ref.read(x.batch.whole()) for x in (watching, alone))
            assert torch.equal(*references)
        for (name, master), (_, other) in zip(
            run.policy.named_parameters(), found[0][0].policy.named_parameters(), strict=True
        ):
            assert torch.equal(master, other), name
        logps = (x.batch.logp.read(x.batch.whole()) for x in (watching, found[0][1]))
        assert torch.equal(*logps)
    assert len({run.updates.rounds for run, _ in found}) == 1
    if few:
        assert any(run.updates.parts < run.updates.rounds for run, _ in found)
    if tokens == 24:
        assert all(run.updates.parts > 0 for run, _ in found)


class Rare(Rewards):
    """Reward 1 for few responses, so that most groups have equal rewards."""

    def score(self, *arguments: Any, **options: Any) -> RewardResult:
        found = super().score(*arguments, **options)
        total = [float(score >= 2.0) for score in found.total]
        return RewardResult(total, {"own": total}, {"own": 0}, [])


def test_dynamic_sampling_runs_the_same_rounds_on_any_number_of_ranks(llama, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "Rewards", Rare)
    sampling = {"rollout": {"dynamic_sampling": {"max_rounds": 3, "oversample": 1.5}}}
    sections = {"model": {"dtype": "float32"}, "objective": {"name": "grpo", "mask_truncated": True}, **sampling}
    _, alone = take(llama, SingleProcess(), **sections)
    assert alone.sampled_metrics["sampling/rounds"] > 1 and 0 < alone.sampled_metrics["sampling/equal_frac"] < 1
    for _, watching in run_threads(2, lambda ranks: take(llama, ranks, **sections)):
        assert watching.sampled_metrics == alone.sampled_metrics
        assert watching.rollouts == alone.rollouts and watching.scores == alone.scores
        assert_same_batch(watching.batch, alone.batch)


@pytest.mark.parametrize("routing", ["own", "replay"])
def test_the_load_balancing_loss_covers_the_minibatch_of_all_ranks(tiny_model, routing) -> None:
    sections = {
        "model": {"dtype": "float32", "routing": routing},
        "quant": {"scheme": "bf16", "group_size": None},
        "objective": {"name": "grpo", "router_aux_coef": 50.0},  # most of the gradient
        "diagnostics": {"routing_every": 1},
    }
    model = tiny_model("mixtral")
    _, alone = take(model, SingleProcess(), train={"micro_batch_tokens": 4096}, **sections)
    found = run_threads(2, lambda ranks: take(model, ranks, train={"micro_batch_tokens": 24}, **sections))
    for run, watching in found:
        assert run.updates.parts > 1
        assert watching.norms == found[0][1].norms
        assert watching.norms[0] == pytest.approx(alone.norms[0], rel=1e-4)
        for name in ("router/aux_loss", "router/z_loss", "router/load_max", "router/entropy"):
            assert watching.metrics[name] == pytest.approx(alone.metrics[name], rel=1e-6), name


def test_the_last_epochs_log_probs_are_kept_even_if_another_rank_had_the_response_before(llama):
    sections = {
        "train": {"micro_batch_tokens": 24, "epochs": 3},
        "model": {"dtype": "float32"},
        "optim": {"lr": 2e-2},
        "quant": {"learner": "full_precision"},
        "objective": {"name": "reinforce"},
        "correction": {"level": "token", "signal": "rollout", "mode": "raw", "upper": None},
    }

    def last(ranks: Ranks) -> None:
        run, seen = make(llama, ranks, **sections), {}

        class Forwards(Watching):
            """seen: (minibatch, log-probs, weights) of each response's last forward on this rank."""

            minibatches = 0

            def minibatch(self, minibatch: Part) -> None:
                self.minibatches += 1

            def forward(self, part: Part, logps: TokenLogProbs) -> None:
                found = logps.logp.detach(), run.learner.objective.weights(logps, part.segments)
                columns = (packed.split([len(response) for response in part.responses]) for packed in found)
                for index, *own in zip(part.indices, *columns, strict=True):
                    seen[index] = [self.minibatches, *(values.tolist() for values in own)]

        watching = Forwards()
        probe = Probe(run.policy, run.learner.objective, run.config, run.sampling.truncation, (), True, ranks=ranks)
        step.rl_step(run.config, run, 0, Observers([watching, probe]))
        batch, newest = watching.batch, dict[int, list[Any]]()
        for index, own in (pair for rank in ranks.gather(list(seen.items())) for pair in rank):
            newest[index] = max(newest.get(index, [0]), own)
        expected = [newest[index] for index in range(len(batch))]
        assert batch.logp.read(batch.whole()).tolist() == [x for _, logp, _ in expected for x in logp]
        assert probe.tokens(batch).weights.tolist() == [x for _, _, weights in expected for x in weights]

    run_threads(2, last)


# --- faults


def test_a_fault_of_one_rank_before_the_learner_ends_the_step_of_all(llama):
    def one(ranks: Ranks) -> Any:
        run = make(llama, ranks)
        if ranks.rank == 1:

            def broken(*_: Any, **__: Any) -> None:
                raise UserError("the sampler is gone")

            run.engine.generate = broken
        before = [p.detach().clone() for _, p in run.policy.named_parameters()]
        try:
            step.rl_step(run.config, run, 0, Observers([Watching()]))
        except Exception as error:
            assert ranks.agreed is error
            assert all(torch.equal(a, b) for a, (_, b) in zip(before, run.policy.named_parameters(), strict=True))
            return error

    first, second, third = run_threads(3, one, faults=True)
    assert isinstance(second, UserError) and str(second) == "the sampler is gone"
    for error in (first, third):
        assert isinstance(error, OtherRankFailed) and "rank 1" in str(error) and "the sampler is gone" in str(error)


def score(config: RewardConfig, of_rank: dict[int, list[str]]):
    """A rank's completions through a pool of its own, and what all have then."""
    from qarl.rewards.shared import gather_results, score_share

    def one(ranks: Ranks) -> Any:
        prompts = [Prompt(i, [1], f"p{i}", {"answer": str(i)}) for i in range(4)]
        own = ranks.share(4)
        rollouts = [Rollout(i, 0, [3], [-1.0], "stop", 0, 0, of_rank[i]) for i in own]
        with RewardPool(config, ["answer"]) as pool:
            found = score_share(pool, prompts, rollouts, ranks)
            return gather_results(found, ranks, config.max_failed_frac)

    return one


HANGS = """
import time
def judge(completions, prompts, **columns):
    if "hang" in completions:
        time.sleep(60)
    return [float(len(c)) for c in completions]
"""


def test_a_reward_that_hangs_on_one_rank_is_judged_over_all(tmp_path, monkeypatch):
    limit_only(monkeypatch, ["hang"])
    (tmp_path / "judges.py").write_text(HANGS)
    config = RewardConfig.model_validate(
        {"functions": [{"name": f"{tmp_path}/judges.py:judge"}], "timeout_s": 1, "workers": 1, "max_failed_frac": 0.3}
    )
    found = run_threads(2, score(config, {0: "a", 1: "bb", 2: "hang", 3: "d"}), faults=True)
    # half of rank 1's, a quarter of all
    assert all(r.total == [1.0, 2.0, 0.0, 1.0] and r.failed == {"judge": 1} for r in found)
    assert found[0].messages == found[1].messages and "completion 2 scores 0" in "".join(found[0].messages)
