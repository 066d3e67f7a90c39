"""Tokens outside the learner's truncated distribution: every objective and correction against the transcription."""

import copy
import math
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_sections import objective_config
from qarl_kernels.logprob import Truncation, log_probs_of, token_logprobs
from ragged import Batch, random_batch
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
from transcription import Response, gradient_of_formula, loss

from qarl.config import CorrectionConfig
from qarl.objectives.base import RatioObjective
from qarl.objectives.common import finish_stats
from qarl.objectives.correction import per_token
from qarl.objectives.objective import build_objective
from qarl.objectives.registry import BY_NAME
from qarl.objectives.segments import Segments, Totals

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


def numbers_and_levels() -> list[tuple[int, str | None]]:
    """The first setting of each objective with every level, and each further setting with one level in turn."""
    levels = ["response", "token", None]
    cases, seen = [], set()
    for number, options in enumerate(objectives()):
        further = options["name"] in seen
        seen.add(options["name"])
        cases += [(number, level) for level in ([levels[number % 3]] if further else levels)]
    return cases


@pytest.mark.parametrize(
    ("number", "level"),
    numbers_and_levels(),
    ids=lambda x: f"{x}-{identity(objectives()[x])}" if isinstance(x, int) else str(x),
)
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
def test_with_dvp_one_token_outside_drops_its_response_exactly_if_the_ratio_is_per_response(
    options, correction, level, snapshot
):
    """The paper's estimator in the mismatch it is made for: the sampler drew a token that the learner does not hold."""
    batch = random_batch([3, 3], [1.0, 1.0], 0.0, dtype=torch.float32)
    logp = batch.logp.detach().clone()
    logp[1] = -math.inf
    if snapshot:
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


def test_a_nan_in_a_pruned_response_reaches_the_gradient():
    for name in ("rloo", "tbpo", "grpo"):
        batch = random_batch([3, 2], [1.0, -1.0], 0.001)
        logp = batch.logp.detach().clone()
        logp[0], logp[1] = math.nan, -math.inf
        batch.logp = logp.requires_grad_()
        objective = build_objective(objective_config(name=name, dvp_outside="response"), NONE)
        value, _ = objective(batch.logps, batch.advantages, batch.segments, TOTALS)
        assert math.isnan(value.item())


CISPO = str(Path(__file__).parents[2] / "examples" / "custom_objective.py") + ":cispo"
VOCABULARY = 40
TRUNCATION = st.builds(
    Truncation,
    temperature=st.sampled_from([0.6, 1.0, 1.4]),
    top_k=st.sampled_from([0, 0, 3, 10]),
    top_p=st.sampled_from([1.0, 0.6, 0.9]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3]),
)


def sampled_batch(seed: int, truncation: Truncation) -> Batch:
    """Tokens sampled from random logits, and the log-probs of a learner that was perturbed, at the snapshot or not."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [12, *torch.randint(0, 9, (6,), generator=generator).tolist()]
    logits = 2.0 * torch.randn(sum(lengths), VOCABULARY, generator=generator)
    tokens = torch.multinomial(log_probs_of(logits.clone(), truncation).exp(), 1, generator=generator)[:, 0]
    mismatch, moved = (random.Random(seed).choice(sizes) for sizes in ([0.0, 0.0, 0.05, 0.3], [0.0, 0.05, 0.3]))

    def learner(size: float) -> torch.Tensor:
        nonlocal logits
        logits = logits + size * torch.randn(logits.shape, generator=generator)
        return token_logprobs(logits, None, torch.eye(VOCABULARY), tokens, truncation, 64)[0].double()

    sampler, old = learner(0.0), learner(mismatch)
    now, shadow = learner(moved), learner(mismatch)
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    return Batch(now.requires_grad_(), old, sampler, advantages, Segments.from_lengths(lengths), shadow)


def evaluated(objective, batch: Batch):
    """Loss, gradient, metrics, weights (1 without a correction)."""
    totals = Totals(len(batch.segments.lengths), len(batch.logp), MAX_TOKENS)
    arguments = (batch.logps, batch.advantages, batch.segments)
    value, stats = objective(*arguments, totals, objective.constants(*arguments))
    (gradient,) = torch.autograd.grad(value, batch.logp)
    weights = objective.weights(batch.logps, batch.segments)
    return value.item(), gradient, finish_stats(stats), torch.ones_like(gradient) if weights is None else weights


@pytest.mark.parametrize("name", sorted(name for name, objective in BY_NAME.items() if objective.rewarded))
@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), truncation=TRUNCATION, dvp=st.booleans())
def test_sampled_tokens_outside_drop_themselves_and_with_dvp_their_response(name, seed, truncation, dvp):
    """A token outside is equal to a masked one: all its log-probs equal, its value 0. No other token notices."""
    draw = random.Random(seed)
    options = {"name": name} | ({"path": CISPO} if name == "custom" else {})
    if issubclass(BY_NAME[name], RatioObjective):
        options["ratio"] = draw.choice(["train", "rollout", "shadow"] + ["one"] * (name != "rspo"))
    pool = [{}] if name in ("tbpo", "mis_gspo") else [{}, *CORRECTIONS]
    chosen = draw.choice(pool)
    correction = correction_config(chosen) if chosen else NONE
    section = objective_config(**options, **({"dvp_rho": 0.02} if dvp else {}))
    objective = build_objective(section, correction)
    batch = sampled_batch(seed, truncation)
    segments, by_shadow = batch.segments, options.get("ratio") == "shadow"
    arguments = batch.logps, segments
    columns = [batch.logp, batch.logp_old, *([batch.logp_shadow] if by_shadow else [])]
    out = torch.stack([x.detach().isneginf() for x in columns]).any(0)
    hit = segments.expand(segments.sum(out.long()) > 0)
    assert dvp or objective.pruning == "token"
    gone = hit if objective.pruning == "response" else out
    value, gradient, metrics, weights = evaluated(objective, batch)

    assert not gradient[gone].any()  # exactly 0
    masked = copy.copy(batch)
    masked.logp = batch.logp.detach().masked_fill(gone, 0.0).requires_grad_()
    for column in ("logp_old", "logp_sampler", "logp_shadow"):
        setattr(masked, column, getattr(batch, column).masked_fill(gone, 0.0))
    _, expected, _, kept = evaluated(objective, masked)
    if not objective.needs.minibatch:  # a mean over the minibatch counts what is masked as 0
        assert torch.equal(gradient[~gone], expected[~gone])
        assert torch.equal(weights[~gone], kept[~gone])
    assert not weights[gone].any() or correction.level == "none"

    assert metrics["policy/outside_frac"] == pytest.approx(out.double().mean().item())
    lost = segments.sum(((weights != 0) & ~gone).long()) == 0
    share = lost[segments.lengths > 0].double().mean().item()
    assert metrics["policy/zero_weight_responses_frac"] == pytest.approx(share)
    if "correction/rejected_frac" in metrics:
        by_token = per_token(objective.correction)
        zero = (weights == 0).double().mean().item() if by_token else share
        assert metrics["correction/rejected_frac"] == pytest.approx(zero)
    if name == "custom":
        return
    # diagnostics see the same tokens clipped as the objective does
    if objective.band is not None and name != "positive_only":
        clipped = objective.band.outside(objective.log_ratio(*arguments), batch.advantages, segments)
        counted = ~gone & (weights != 0)
        assert torch.equal(clipped[counted], gradient[counted] == 0.0)
    lengths = segments.lengths.tolist()
    columns = (x.detach().split(lengths) for x in batch_columns(batch))
    rows = zip(*columns, batch.advantages.tolist(), strict=True)
    responses = [Response(*(x.tolist() for x in row), a) for *row, a in rows]
    frozen = [list(r.l) for r in responses]
    formula = loss(section, correction, responses, frozen, MAX_TOKENS, objective.pruning)
    assert value == pytest.approx(formula, rel=1e-11, abs=1e-12)


def batch_columns(batch: Batch) -> list[torch.Tensor]:
    """l, o, b, q as `Response` has them, and zeros for the reference and the entropy, which no penalty reads here."""
    none = torch.zeros_like(batch.logp_old)
    return [batch.logp, batch.logp_old, batch.logp_sampler, batch.logp_shadow, none, none]
