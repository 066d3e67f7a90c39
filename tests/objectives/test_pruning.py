"""Tokens outside the learner's truncated distribution: every objective and correction against the transcription."""

from __future__ import annotations

import math
import random

import pytest
import torch
from objective_sections import objective_config
from ragged import random_batch
from test_objective_formulas import (
    ADVANTAGES,
    CORRECTIONS,
    LENGTHS,
    MAX_TOKENS,
    POLICY_GRADIENT,
    SPREAD,
    TOTALS,
    correction_config,
    identity,
    objectives,
    responses_of,
)
from transcription import loss

from qarl.config import CorrectionConfig
from qarl.objectives import build_objective, finish_stats

NONE = CorrectionConfig(level="none")


def with_holes(seed: int):
    """A random batch in which some tokens are outside the learner's set: now, at the snapshot, or in both forwards."""
    draw = random.Random(seed)
    batch = random_batch(LENGTHS, ADVANTAGES, SPREAD, seed)
    logp = batch.logp.detach().clone()
    holes = [i for i in range(len(logp)) if draw.random() < 0.12] or [draw.randrange(len(logp))]
    for i in holes:
        columns = draw.choice([("l",), ("o",), ("l", "o"), ("l", "o", "q"), ("l", "o", "ref"), ("q",), ("o", "b")])
        for name in columns:
            x = {
                "l": logp,
                "o": batch.logp_old,
                "q": batch.logp_shadow,
                "ref": batch.logp_ref,
                "b": batch.logp_sampler,
            }[name]
            x[i] = -math.inf
    batch.logp = logp.requires_grad_()
    return batch


def gradient_of_formula(formula, responses) -> list[float]:
    step, found = 1e-6, []
    for r in responses:
        for i, x in enumerate(r.l):
            if x == -math.inf:
                found.append(0.0)
                continue
            r.l[i] = x + step
            up = formula()
            r.l[i] = x - step
            found.append((up - formula()) / (2 * step))
            r.l[i] = x
    return found


@pytest.mark.parametrize("level", ["response", "token", None])
@pytest.mark.parametrize("number", range(len(objectives())), ids=lambda i: f"{i}-{identity(objectives()[i])}")
def test_loss_and_gradient_are_those_of_the_formula_wherever_tokens_are_outside(number, level):
    options = objectives()[number]
    draw = random.Random(f"{number}-{level}")
    possible = CORRECTIONS + (POLICY_GRADIENT if options["name"] in ("reinforce", "rloo", "on_policy") else [])
    corrections = [{}] if options["name"] == "tbpo" else [{}, *draw.sample(possible, 3)]
    for correction in corrections:
        objective_cfg = objective_config(**options, dvp_outside=level)
        correction_cfg = correction_config(correction) if correction else NONE
        batch = with_holes(draw.randrange(2**32))
        objective = build_objective(objective_cfg, correction_cfg)
        arguments = (batch.logps, batch.advantages, batch.segments)
        got, stats = objective(*arguments, TOTALS, objective.constants(*arguments))
        got.backward()

        responses = responses_of(batch)
        frozen = [list(r.l) for r in responses]
        pruning = level or objective_cfg.default_pruning(correction_cfg.level)

        def formula() -> float:
            return loss(objective_cfg, correction_cfg, responses, frozen, MAX_TOKENS, pruning)  # noqa: B023

        assert got.item() == pytest.approx(formula(), rel=1e-12, abs=1e-13)
        expected = torch.tensor(gradient_of_formula(formula, responses), dtype=torch.float64)
        # central differences: truncation of order step^2, rounding of order 1e-16 / step
        torch.testing.assert_close(batch.logp.grad, expected, rtol=1e-7, atol=1e-9)
        assert all(map(math.isfinite, finish_stats(stats).values()))


DEFAULTS = [
    ({"name": "tbpo"}, {}, "response"),
    ({"name": "gspo"}, {}, "response"),
    ({"name": "mis_gspo"}, {}, "response"),
    ({"name": "rloo"}, {}, "response"),
    ({"name": "reinforce"}, {}, "response"),
    ({"name": "rloo"}, {"level": "sequence"}, "response"),
    ({"name": "rloo"}, {"level": "token"}, "token"),
    ({"name": "grpo"}, {}, "token"),
    ({"name": "grpo"}, {"level": "geometric"}, "response"),
    ({"name": "dapo"}, {"level": "sequence", "mode": "mask"}, "response"),
    ({"name": "sapo"}, {"level": "token"}, "token"),
    ({"name": "on_policy"}, {}, "token"),
]


@pytest.mark.parametrize(("options", "correction", "level"), DEFAULTS)
@pytest.mark.parametrize("snapshot", [True, False], ids=["on policy", "after an update"])
def test_one_token_outside_takes_the_response_exactly_where_the_ratio_is_the_response_s(
    options, correction, level, snapshot
):
    """The paper's estimator in the mismatch it is made for: the sampler drew a token that the learner does not hold."""
    batch = random_batch([3, 3], [1.0, 1.0], 0.0, dtype=torch.float32)
    logp = batch.logp.detach().clone()
    logp[1] = -math.inf
    if snapshot:
        batch.logp_old[1] = -math.inf
    batch.logp = logp.requires_grad_()
    objective = build_objective(objective_config(**options), correction_config(correction))
    value, stats = objective(batch.logps, batch.advantages, batch.segments, TOTALS)
    value.backward()
    gradient = batch.logp.grad
    assert gradient[1] == 0.0 and gradient[3:].all()
    assert bool(gradient[[0, 2]].any()) == (level == "token")  # exactly 0, or not
    metrics = finish_stats(stats)
    assert metrics["policy/outside_frac"] == pytest.approx(1 / 6)
    assert metrics["policy/outside_responses_frac"] == 0.5
    if correction:
        assert metrics["correction/weight_mean"] == pytest.approx(5 / 6 if level == "token" else 0.5)


@pytest.mark.parametrize("name", ["tbpo", "gspo", "rloo", "grpo", "sapo", "on_policy"])
def test_a_response_that_is_pruned_away_is_worth_exactly_nothing_and_stays_in_the_denominators(name):
    objective = build_objective(objective_config(name=name, dvp_outside="response"), NONE)
    batch = random_batch(LENGTHS, ADVANTAGES, 0.001)
    whole = batch.logp.detach().clone()
    alone = []
    for hole in (False, True):
        logp = whole.clone()
        if hole:
            logp[6] = -math.inf  # of the fourth response, tokens 5 to 13
        batch.logp = logp.requires_grad_()
        objective(batch.logps, batch.advantages, batch.segments, TOTALS)[0].backward()
        alone.append(batch.logp.grad)
    assert alone[0][5:14].any() and not alone[1][5:14].any()
    for rest in (slice(0, 5), slice(14, None)):  # the others' gradients have not changed by a bit
        assert torch.equal(alone[0][rest], alone[1][rest])


def test_a_nan_in_a_pruned_response_reaches_the_gradient():
    for name in ("rloo", "tbpo", "grpo"):
        batch = random_batch([3, 2], [1.0, -1.0], 0.001)
        logp = batch.logp.detach().clone()
        logp[0], logp[1] = math.nan, -math.inf
        batch.logp = logp.requires_grad_()
        objective = build_objective(objective_config(name=name, dvp_outside="response"), NONE)
        value, _ = objective(batch.logps, batch.advantages, batch.segments, TOTALS)
        assert math.isnan(value.item())
