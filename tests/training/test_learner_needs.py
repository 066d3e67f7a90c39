"""What objectives need of the learner (shadow, reference, entropy, constants), and its configured numerics."""

import math

import pytest
import torch
from tiny_runs import Parts, live, parts, settings

from qarl.config import Config

pytestmark = pytest.mark.usefixtures("one_thread")

UNALIGNED = {"quant": {"scheme": "w8a8", "group_size": None, "learner": "full_precision"}}


def logps_seen(run: Parts) -> list:
    """Return a list that later calls of the objective append to: (TokenLogProbs, Constants)."""
    seen, objective = [], run.learner.objective

    class Watched:
        def __getattr__(self, name):
            return getattr(objective, name)

        def __call__(self, logps, advantages, segments, totals, constants):
            seen.append((logps, constants))
            return objective(logps, advantages, segments, totals, constants)

    run.learner.objective = Watched()
    return seen


NEEDS = {
    "penalties": {**UNALIGNED, "objective": {"name": "grpo", "kl_coef": 0.1, "entropy_coef": 0.01}},
    "detach_center": {"objective": {"name": "grpo", "loss": "detach_center"}},
    "normalize": {**UNALIGNED, "correction": {"level": "token", "mode": "truncate", "normalize": True}},
    "centered_shadow": {**UNALIGNED, "objective": {"name": "dapo", "loss": "detach_center", "ratio": "shadow"}},
}


@pytest.mark.parametrize("need", NEEDS)
def test_micro_batches_of_every_need_add_up_to_the_minibatch(llama, need):
    results = []
    for tokens in (40, 100_000):
        sections = {"train": {"micro_batch_tokens": tokens, "epochs": 2}, "optim": {"lr": 1e-9}, **NEEDS[need]}
        run = parts(llama, **sections, model={"dtype": "float32"})
        seen, step = [], run.optimizer.step
        run.optimizer.step = lambda: (
            seen.append({n: p.grad.clone() for n, p in run.policy.named_parameters()}) or step()  # noqa: B023
        )
        results.append((seen, run.learn(live(run))))
    *cuts, (whole, expected) = results
    del expected["learner_tokens"]  # a prompt is run again in every micro-batch
    assert len(whole) == 4 and all(math.isfinite(value) for value in expected.values())
    for cut, metrics in cuts:
        for one, other in zip(cut, whole, strict=True):
            for name, gradient in other.items():  # float32 sums in another order
                assert float((one[name] - gradient).norm() / gradient.norm()) < 1e-4, name
        assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("sets, routing", [("own", "own"), ("replay", "own"), ("own", "replay_learner")])
def test_the_shadow_ratio_starts_from_the_samplers_own_log_probs(tiny_model, sets, routing):
    model = tiny_model("llama" if routing == "own" else "qwen3_moe")
    sampled = {"rollout": {"top_p": 0.6}, "objective": {"name": "grpo", "ratio": "shadow", "truncation_set": sets}}
    sampled |= UNALIGNED | {"model": {"routing": routing}}
    run = parts(model, **sampled, optim={"lr": 1e-2}, train={"minibatch_size": 16, "epochs": 2})
    seen = logps_seen(run)
    run.learn(live(run))
    (first, _), (second, _) = seen
    assert torch.equal(first.logp_shadow, first.logp_sampler) and not first.logp_shadow.requires_grad
    assert not torch.equal(first.logp.detach(), first.logp_sampler)
    assert not torch.equal(second.logp_shadow, second.logp_sampler)


def test_the_reference_is_the_model_at_the_start(llama):
    run = parts(llama, objective={"name": "grpo", "kl_coef": 0.5}, optim={"lr": 1e-2})
    batch = live(run)
    with torch.no_grad():
        start = run.policy.logprobs(batch.prompts, batch.responses, run.sampling.truncation, 128)[0]
    first = run.learn(batch)
    second = run.learn(live(run, 2), 1)
    assert torch.equal(batch.logp_ref.read(batch.whole()), start) and torch.equal(batch.whole().logp_old, start)
    assert 0.0 < first["policy/kl_ref"] < second["policy/kl_ref"]


def test_responses_without_advantage_count_where_there_is_a_penalty(llama):
    for coefficients, moves in (({"kl_coef": 0.5}, True), ({"entropy_coef": 0.1}, True), ({}, False)):
        run = parts(llama, objective={"name": "grpo", **coefficients}, optim={"lr": 1e-2})
        run.learn(live(run))  # away from the reference
        before, batch = run.masters(), run.batch(lambda tokens: 1.0)
        metrics = run.learn(batch, 1)
        changed = any(not torch.equal(before[name], master) for name, master in run.masters().items())
        assert changed == moves and (metrics["policy/grad_norm"] > 0) == moves


def test_the_pass_for_constants_gives_logp_old_too_and_is_saved_while_the_weights_are_the_snapshots(llama):
    # Four minibatches. The first has a pass of its own; the others ran for logp_old, and run again after a step.
    run = parts(llama, train={"minibatch_size": 4}, **NEEDS["normalize"])
    ran, batch = run.forwards(), live(run)
    without_pass = run.learner.forwards(batch, 0)
    run.learn(batch)
    assert len(ran) == without_pass + 4 + 12 == 28 + 4 + 12

    still = parts(llama, train={"minibatch_size": 4}, **NEEDS["normalize"])
    ran = still.forwards()
    still.learn(still.batch(lambda tokens: 1.0))  # no advantage: no step, so the weights stay
    assert len(ran) == without_pass + 4


# --- numerics


def test_rollouts_are_drawn_under_the_objectives_own_pruning(llama):
    run = parts(llama, objective={"name": "grpo", "dvp_rho": 0.05})
    assert run.sampling.truncation.min_p == run.learner.truncation.min_p == 0.05
    assert parts(llama, rollout={"min_p": 0.1}).sampling.truncation.min_p == 0.1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_masters_stay_on_the_grid_of_their_dtype(llama, dtype, optimizer):
    run = parts(llama, optim={"name": optimizer, "master_dtype": dtype})
    grid = {"float16": torch.float16, "bfloat16": torch.bfloat16}[dtype]
    before = run.masters()
    assert all(torch.equal(m, m.to(grid).float()) for m in before.values()), "at the start"
    run.learn(live(run))
    after = run.masters()
    assert all(torch.equal(m, m.to(grid).float()) for m in after.values())
    assert any(not torch.equal(before[name], after[name]) for name in after)
    assert all(t.dtype == torch.float32 for name, t in run.optimizer.state_tensors()[0].items())


def test_a_loss_scale_of_a_power_of_two_changes_no_bit(llama):
    found = []
    for scale in (1.0, 1024.0):
        run = parts(llama, model={"dtype": "float32"}, optim={"loss_scale": scale})
        metrics = run.learn(live(run))
        found.append((metrics, run.masters()))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


def test_a_float16_learner_trains(llama):
    run = parts(llama, **UNALIGNED, model={"learner_dtype": "float16"})
    assert run.learner.updates.scale.dynamic and run.policy.learner_dtype == torch.float16
    metrics = run.learn(live(run))
    assert metrics["policy/skipped_steps"] == 0.0 and metrics["policy/version"] == 2.0
    wide = parts(llama, **UNALIGNED, model={"learner_dtype": "float32"})
    assert metrics["policy/grad_norm"] == pytest.approx(wide.learn(live(wide))["policy/grad_norm"], rel=0.02)


def test_the_loss_scale_follows_the_learners_dtype(llama):
    def scale(**model) -> float:
        return Config.model_validate(settings(llama, quant={"learner": "full_precision"}, model=model)).loss_scale

    assert scale() == scale(learner_dtype="float32") == 1.0
    assert scale(dtype="float16") == scale(learner_dtype="float16") == 65536.0
    assert scale(dtype="float16", learner_dtype="float32") == 1.0
