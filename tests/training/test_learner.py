"""The learner: log-probs, gradients, skipped steps, and that it learns."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tiny_runs import Parts, live, parts

from qarl.batch.batch import Batch
from qarl.batch.observer import Observer
from qarl.training.metrics import token_metrics

pytestmark = pytest.mark.usefixtures("one_thread")


def gradients(run: Parts, batch: Batch) -> tuple[list[dict[str, torch.Tensor]], dict[str, float]]:
    """Run `learn`. Return the gradient of every optimizer step by name, and the metrics."""
    seen: list[dict[str, torch.Tensor]] = []
    step = run.optimizer.step

    def record() -> None:
        seen.append({name: p.grad.clone() for name, p in run.policy.named_parameters()})
        step()

    run.optimizer.step = record
    metrics = run.learn(batch)
    return seen, metrics


class Wrapped:
    """An objective whose results pass through `change(loss, stats, *arguments)`."""

    def __init__(self, objective, change):
        self._objective, self._change = objective, change

    def __getattr__(self, name):
        return getattr(self._objective, name)

    def __call__(self, *arguments):
        return self._change(*self._objective(*arguments), *arguments)


@contextmanager
def broken_gradients(run: Parts) -> Iterator[None]:
    """Context manager in which every gradient is NaN."""
    objective = run.learner.objective
    run.learner.objective = Wrapped(objective, lambda loss, stats, *_: (loss * math.nan, stats))
    yield
    run.learner.objective = objective


def alone(run: Parts, batch: Batch) -> list[torch.Tensor]:
    """Return the log-probs of each response under the current policy, each from its own forward."""
    with torch.no_grad():
        return [
            run.policy.logprobs([p], [r], run.sampling.truncation, 128)[0]
            for p, r in zip(batch.prompts, batch.responses, strict=True)
        ]


@pytest.mark.parametrize("minibatch", [4, 16])
def test_logp_old_is_that_of_the_snapshot_bit_for_bit_whatever_was_learned_since(llama, minibatch):
    run = parts(llama, train={"minibatch_size": minibatch, "epochs": 2}, optim={"lr": 1e-2})
    batch = live(run)
    at_the_snapshot = alone(run, batch)
    run.learn(batch)
    assert all(torch.equal(kept, value) for kept, value in zip(batch.logp_old, at_the_snapshot, strict=True))
    assert not any(torch.equal(now, old) for now, old in zip(alone(run, batch), at_the_snapshot, strict=True))


def test_forwards_are_those_that_learn_reports_and_tokens_count_a_shared_prompt_once(llama):
    run = parts(llama, train={"minibatch_size": 4, "epochs": 2})
    run.policy.kept.add(run.policy.current)
    watch, done = Observer(), []
    watch.progress = done.append
    batch = live(run)
    reported = run.learner.forwards(batch, 0)
    run.learn(batch, watch=watch)
    assert sum(done) == reported == 2 * 16 + 12

    batch = live(run)
    done.clear()
    lengths = [len(response) for response in batch.responses]
    batch.versions = [[0] * (n // 2) + [batch.version] * (n - n // 2) for n in lengths]  # two forwards each
    reported = run.learner.forwards(batch, 1)
    run.learn(batch, 1, watch)
    assert sum(done) == reported == 2 * 16 + 2 * 16
    assert run.learner.totals.entropy_tokens == sum(lengths)  # a token counts at the version that sampled it

    run = parts(llama, train={"minibatch_size": 16})
    batch = live(run)
    assert run.learn(batch)["learner_tokens"] == 4 * 3 + sum(len(r) for r in batch.responses)


def half_idle(run: Parts) -> Batch:
    batch = live(run)
    batch.advantages[::2] = 0.0
    return batch


def test_responses_with_advantage_0_count_in_gradient_and_stats(llama):
    results = []
    for nothing in (0.0, 1e-30):  # the second goes through the backward, and gives nothing
        run = parts(llama, model={"dtype": "float32"}, train={"minibatch_size": 16}, optim={"lr": 1e-9})
        batch = half_idle(run)
        batch.advantages[::2] = nothing
        results.append(gradients(run, batch))
    (idle, metrics), (through, expected) = results
    for name, gradient in through[0].items():
        assert torch.allclose(idle[0][name], gradient, rtol=1e-4, atol=1e-7), name
    assert metrics.pop("policy/zero_advantage_frac") == 0.5 and expected.pop("policy/zero_advantage_frac") == 0.0
    del metrics["learner_tokens"], expected["learner_tokens"]
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_a_minibatch_without_advantages_makes_no_step(llama):
    run = parts(llama)
    batch = run.batch(lambda tokens: 1.0)
    before = run.masters()
    metrics = run.learn(batch)
    assert all(torch.equal(before[name], master) for name, master in run.masters().items())
    assert metrics["policy/version"] == 0.0 and metrics["policy/grad_norm"] == 0.0
    assert metrics["policy/entropy"] > 0.0 and batch.logp_old.known(batch.whole())


def test_a_gradient_that_is_not_finite_touches_nothing_and_is_counted(llama):
    run = parts(llama, train={"max_skipped_steps": 5})
    run.learn(live(run))  # so that the optimizer has state
    batch, before, codes = live(run, seed=2), run.masters(), run.policy.current
    state = {name: tensor.clone() for name, tensor in run.optimizer.state_tensors()[0].items()}
    with broken_gradients(run):
        metrics = run.learn(batch)
    assert all(torch.equal(before[name], master) for name, master in run.masters().items())
    after = run.optimizer.state_tensors()[0]
    assert state and state.keys() == after.keys() and all(torch.equal(state[name], after[name]) for name in state)
    assert run.policy.current is codes
    assert metrics["policy/skipped_steps"] == 2.0 and math.isnan(metrics["policy/grad_norm"])
    assert run.learner.skipped_in_a_row == 2


def test_a_skipped_step_leaves_its_gradient_out_of_the_next(llama):
    run = parts(llama, train={"minibatch_size": 16})
    with broken_gradients(run):
        run.learn(live(run))
    steps, _ = gradients(run, live(run))
    assert all(g.isfinite().all() for step in steps for g in step.values())


ALIGNED = [("w4a16", 32), ("fp8", None), ("w4a8", 32)]


@pytest.mark.parametrize("scheme, group", ALIGNED)
def test_an_aligned_learner_has_no_mismatch_at_all(llama, scheme, group):
    run = parts(llama, quant={"scheme": scheme, "group_size": group}, train={"minibatch_size": 4})
    for step in range(2):
        batch = live(run, seed=step)
        run.learn(batch, step)
        assert token_metrics(batch)["mismatch/delta_abs_max"] == 0.0


def test_fake_quantization_is_closer_to_the_sampler_than_full_precision(llama):
    found = {}
    for learner in ("fake_quant", "full_precision"):
        run = parts(llama, quant={"learner": learner})
        batch = live(run)
        run.learn(batch)
        found[learner] = token_metrics(batch)
    assert found["fake_quant"]["mismatch/delta_abs_mean"] < 0.2 * found["full_precision"]["mismatch/delta_abs_mean"]
    assert 1e-2 < found["full_precision"]["mismatch/delta_abs_max"] < 10.0


def test_gradient_checkpointing_changes_no_bit(llama):
    masters = []
    for on in (False, True):
        run = parts(llama)
        run.policy.decoder.recompute = "layer" if on else "elementwise"
        run.learn(live(run))
        masters.append(run.masters())
    assert all(torch.equal(masters[0][name], masters[1][name]) for name in masters[0])


def test_reward_rises(llama):
    run = parts(
        llama,
        quant={"scheme": "w8a8", "group_size": None},
        objective={"name": "tbpo"},
        rollout={"n": 8, "max_num_seqs": 32},
        train={"minibatch_size": 16},
        optim={"name": "muon", "lr": 2e-2},
    )
    rewards: list[float] = []

    def small_ids(tokens: list[int]) -> float:
        rewards.append(sum(token < 128 for token in tokens) / len(tokens))
        return rewards[-1]

    for step in range(12):
        run.learn(run.batch(small_ids, seed=step), step)
    first, last = sum(rewards[:96]) / 96, sum(rewards[-96:]) / 96  # 32 responses a step
    assert last > first + 0.2, (first, last)


def test_the_retained_mass_is_of_every_response_token_at_the_snapshot(llama):
    run = parts(llama, objective={"dvp_rho": 0.3}, train={"minibatch_size": 8})
    batch = live(run)
    kept: list[torch.Tensor] = []
    with torch.no_grad():
        run.policy.logprobs(batch.prompts, batch.responses, run.sampling.truncation, 64, kept)
    metrics = run.learn(batch)
    assert metrics["policy/retained_mass_mean"] == pytest.approx(kept[0].double().mean().item(), rel=1e-6)
    assert metrics["policy/retained_mass_min"] == pytest.approx(kept[0].min().item(), rel=1e-6)
    assert 0.0 < metrics["policy/retained_mass_min"] < metrics["policy/retained_mass_mean"] < 1.0
    assert not any(name.startswith("policy/retained") for name in parts(llama).learn(live(parts(llama))))
