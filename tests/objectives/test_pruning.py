"""Tokens outside the learner's truncated distribution: every objective and correction against the transcription."""

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
    objectives,
    responses_of,
)
from transcription import gradient_of_formula, loss

from qarl.config import CorrectionConfig
from qarl.objectives.common import finish_stats
from qarl.objectives.objective import build_objective

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
            names = {"o": batch.logp_old, "q": batch.logp_shadow, "ref": batch.logp_ref, "b": batch.logp_sampler}
            (names | {"l": logp})[name][i] = -math.inf
    batch.logp = logp.requires_grad_()
    return batch


# Each setting of the objectives with one level in turn
MET = [(i, ("response", "token", None)[i % 3]) for i in range(len(objectives()))]


@pytest.mark.parametrize(("number", "level"), MET)
def test_loss_and_gradient_are_those_of_the_formula_wherever_tokens_are_outside(number, level):
    options = objectives()[number]
    draw = random.Random(f"{number}-{level}")
    possible = CORRECTIONS + (POLICY_GRADIENT if options["name"] in ("reinforce", "rloo", "on_policy") else [])
    corrections = [{}] if options["name"] in ("tbpo", "mis_gspo") else [{}, draw.choice(possible)]
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
        torch.testing.assert_close(batch.logp.grad, expected, rtol=1e-7, atol=1e-9)
        assert all(map(math.isfinite, finish_stats(stats).values()))


DEFAULTS = [
    ({"name": "tbpo"}, {}, "response"),
    ({"name": "gspo"}, {}, "response"),
    ({"name": "rloo"}, {}, "response"),
    ({"name": "rloo"}, {"level": "token"}, "token"),
    ({"name": "grpo"}, {}, "token"),
    ({"name": "grpo"}, {"level": "geometric"}, "response"),
    ({"name": "on_policy"}, {}, "token"),
]


@pytest.mark.parametrize(("options", "correction", "level"), DEFAULTS)
def test_with_dvp_one_token_outside_drops_its_response_exactly_if_the_ratio_is_per_response(options, correction, level):
    """The paper's estimator in the mismatch it is made for: the sampler drew a token that the learner does not hold."""
    batch = random_batch([3, 3], [1.0, 1.0], 0.0, dtype=torch.float32)
    logp = batch.logp.detach().clone()
    logp[1] = -math.inf
    batch.logp_old[1] = -math.inf
    batch.logp = logp.requires_grad_()
    section = objective_config(**options, dvp_rho=0.1)
    objective = build_objective(section, correction_config(correction))
    value, stats = objective(batch.logps, batch.advantages, batch.segments, TOTALS)
    value.backward()
    gradient = batch.logp.grad
    assert gradient[1] == 0.0 and gradient[3:].all()
    assert bool(gradient[[0, 2]].any()) == (level == "token")  # exactly 0, or not
    metrics = finish_stats(stats)
    assert metrics["policy/outside_frac"] == pytest.approx(1 / 6)
    assert metrics["policy/outside_responses_frac"] == 0.5
    assert metrics["policy/zero_weight_responses_frac"] == (0.5 if level == "response" else 0.0)
    if correction:
        assert metrics["correction/rejected_frac"] == pytest.approx(1 / 6 if level == "token" else 0.5)
        assert metrics["correction/weight_mean"] == pytest.approx(5 / 6 if level == "token" else 0.5)
