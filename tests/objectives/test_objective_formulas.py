"""Every objective with every option, against a plain-Python transcription of its formula: value and gradient."""

import math
from dataclasses import replace

import pytest
import torch
from objective_sections import objective_config
from ragged import random_batch
from transcription import Response, gradient_of_formula, loss

from qarl.config import CorrectionConfig
from qarl.objectives.common import finish_stats
from qarl.objectives.correction_config import RejectRule
from qarl.objectives.objective import build_objective
from qarl.objectives.segments import Totals

LENGTHS = [4, 1, 0, 9, 3, 6, 2, 1]
ADVANTAGES = [1.2, -0.7, 0.5, -1.1, 0.0, 0.9, -0.4, 2.0]
MAX_TOKENS = 16
TOTALS = Totals(len(LENGTHS), sum(LENGTHS), MAX_TOKENS)

CLIP = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}
TBPO = {"seq_clip_ratio_high": 0.04, "neg_seq_clip_ratio_high": 0.07, "neg_seq_clip_ratio_low": 0.03}
RATIOS = ["train", "rollout", "shadow", "one"]
LOSSES = ["clip", "detach", "detach_center", "no_clip"]
SPREAD = 0.3


def objectives() -> list[dict]:
    named = [
        {"name": "tbpo", **TBPO, "seq_tis_imp_ratio_cap": 1.1},
        {"name": "on_policy"},
        {"name": "reinforce"},
        {"name": "rloo"},
        {"name": "grpo", "kl_coef": 0.3, "entropy_coef": 0.2},
        {"name": "tbpo", **TBPO, "kl_coef": 0.3, "kl_estimator": "k1"},
        {"name": "rloo", "kl_coef": 0.3, "kl_estimator": "k2", "entropy_coef": 0.1},
    ]
    for ratio in ("train", "one"):
        for low in (0.0, 0.6):
            mis = {"mis_ratio_low": low, "mis_ratio_high": 1.6, "ratio": ratio}
            named.append({"name": "mis_gspo", "clip_ratio_low": 0.03, "clip_ratio_high": 0.05, **mis})
    for ratio in RATIOS:
        named += [
            {"name": "gspo", "clip_ratio_low": 0.03, "clip_ratio_high": 0.05, "ratio": ratio},
            {"name": "sapo", "sapo_tau_pos": 0.7, "sapo_tau_neg": 1.9, "ratio": ratio},
            {"name": "gmpo", "clip_ratio_low": 0.2, "clip_ratio_high": 0.15, "ratio": ratio},
            {"name": "m2po", "m2_threshold": 0.04, "ratio": ratio},
            *([{"name": "rspo", "ratio": ratio}] if ratio != "one" else []),
        ]
        for name in ["grpo", "dapo", "dual_clip_grpo", "positive_only"]:
            c = {"clip_ratio_c": 1.2} if name == "dual_clip_grpo" else {}
            for form in LOSSES if ratio in ("train", "shadow") else ["clip"]:
                named.append({"name": name, "ratio": ratio, "loss": form, **c, **(CLIP if form != "no_clip" else {})})
    return named


CORRECTIONS = [
    {"level": "token", "upper": 1.2},
    {"level": "token", "mode": "mask", "lower": 0.7, "upper": 1.4, "normalize": True},
    {"level": "sequence", "mode": "mask", "upper": 1.5, "normalize": True},
    {"level": "geometric", "lower": 0.9, "upper": 1.05, "veto": 0.6},
    {"level": "token", "cap": "auto"},
    {"level": "sequence", "mode": "mask", "cap": "auto", "normalize": True},
    {"level": "geometric", "cap": "auto", "veto": 0.6},
    {"veto": 0.7},
    {"reject": [{"estimator": "k3", "aggregate": "mean", "upper": 0.05}]},
    {
        "level": "token",
        "upper": 1.2,
        "veto": 0.5,
        "reject": [
            {"estimator": "k1", "aggregate": "sum", "upper": 0.9, "lower": -0.8},
            {"estimator": "ratio", "aggregate": "max", "lower": 0.45, "upper": 1.9, "signal": "rollout"},
        ],
    },
    # a mask of tokens beside a weight of the tokens, of the response, and alone
    {
        "level": "token",
        "upper": 1.2,
        "reject": [
            {"estimator": "ratio", "aggregate": "token", "lower": 0.8, "upper": 1.3},
            {"estimator": "k3", "aggregate": "sum", "upper": 0.3},
        ],
    },
    {
        "level": "sequence",
        "upper": 1.5,
        "normalize": True,
        "reject": [{"estimator": "k1", "aggregate": "token", "lower": -0.3, "upper": 0.3, "signal": "rollout"}],
    },
    {"reject": [{"estimator": "k2", "aggregate": "token", "upper": 0.04}], "veto": 0.6},
    {"level": "sequence", "mode": "raw"},
    {"level": "token", "mode": "raw", "normalize": True},
]
POLICY_GRADIENT = [  # weights of learner now over sampler, for objectives without a ratio
    {"level": "token", "upper": 1.2, "signal": "rollout"},
    {"level": "sequence", "mode": "raw", "signal": "rollout"},
    {"level": "sequence", "mode": "mask", "lower": 0.5, "upper": 1.8, "signal": "rollout", "normalize": True},
    {"preset": "bypass_pg_is", "upper": 1.4},
    {
        "preset": "bypass_pg_geo_rs_token_tis",
        "upper": 1.1,
        "reject": [{"estimator": "ratio", "aggregate": "mean", "lower": 0.9, "upper": 1.15, "signal": "rollout"}],
    },
]


def correction_config(options: dict) -> CorrectionConfig:
    rules = {"reject": [RejectRule(**rule) for rule in options["reject"]]} if "reject" in options else {}
    return CorrectionConfig(**options | rules)


def identity(options: dict) -> str:
    return "-".join(str(options.get(key)) for key in ("name", "ratio", "loss", "kl_estimator") if options.get(key))


CASES = (
    [pytest.param(options, {}, id=identity(options)) for options in objectives()]
    + [pytest.param({"name": "grpo"}, options, id=f"correction{i}") for i, options in enumerate(CORRECTIONS)]
    + [
        pytest.param({"name": name}, options, id=f"{name}-policy-gradient{i}")
        for name in ("rloo", "on_policy")
        for i, options in enumerate(POLICY_GRADIENT)
    ]
)


def responses_of(batch) -> list[Response]:
    columns = [
        x.detach().split(LENGTHS)
        for x in (batch.logp, batch.logp_old, batch.logp_sampler, batch.logp_shadow, batch.logp_ref, batch.entropy)
    ]
    rows = [[x.tolist() for x in row] for row in zip(*columns, strict=True)]
    return [Response(*row, a) for row, a in zip(rows, batch.advantages.tolist(), strict=True)]


def computed(objective_cfg, correction_cfg, batch):
    objective = build_objective(objective_cfg, correction_cfg)
    needs = objective.needs.minibatch
    arguments = (batch.logps, batch.advantages, batch.segments)
    return objective(*arguments, TOTALS, *([objective.constants(*arguments)] if needs else []))[0]


@pytest.mark.parametrize(("options", "correction_options"), CASES)
def test_the_loss_and_its_gradient_are_those_of_the_formula(options, correction_options):
    objective_cfg, correction_cfg = objective_config(**options), correction_config(correction_options)
    batch = random_batch(LENGTHS, ADVANTAGES, SPREAD)
    got = computed(objective_cfg, correction_cfg, batch)
    got.backward()

    responses = responses_of(batch)
    frozen = [list(r.l) for r in responses]

    def formula() -> float:
        return loss(objective_cfg, correction_cfg, responses, frozen, MAX_TOKENS)

    # float64: a few hundred operations of relative error 2^-53 on numbers of order 1
    assert got.item() == pytest.approx(formula(), rel=1e-12, abs=1e-13)
    expected = torch.tensor(gradient_of_formula(formula, responses), dtype=torch.float64)
    torch.testing.assert_close(batch.logp.grad, expected, rtol=1e-7, atol=1e-9)


def test_the_entropy_gets_its_coefficient_as_gradient_at_every_token_rejected_or_not():
    batch = random_batch(LENGTHS, ADVANTAGES, SPREAD)
    options = objective_config(name="grpo", entropy_coef=0.2, aggregation="token-mean")
    rejects_all = correction_config({"reject": [{"estimator": "ratio", "aggregate": "mean", "lower": 1e6}]})
    loss_value = computed(options, rejects_all, batch)
    loss_value.backward()
    assert batch.entropy.grad.tolist() == pytest.approx([-0.2 / sum(LENGTHS)] * sum(LENGTHS))
    assert not batch.logp.grad.any()


@pytest.mark.parametrize("name", ["grpo", "gspo", "gmpo", "sapo"])
def test_the_router_shift_ratio_multiplies_the_ratio_and_has_no_gradient(name):
    """The same loss and gradient as without it, and with log-probs at the rollout's weights that are moved by it."""
    batch = random_batch([4, 3, 5], [1.0, -0.5, 0.7], SPREAD, seed=3)
    shift = torch.linspace(-0.3, 0.0, 12, dtype=torch.float64)
    found = []
    for moved in (None, shift):
        own = batch.logp.detach().clone().requires_grad_()
        old = batch.logp_old - shift.clamp(min=math.log(0.8)) if moved is None else batch.logp_old
        objective = build_objective(objective_config(name=name, router_shift_floor=0.8), CorrectionConfig())
        logps = replace(batch.logps, logp=own, logp_old=old, router_shift=moved)
        loss, stats = objective(logps, batch.advantages, batch.segments, Totals(3, 12, MAX_TOKENS))
        loss.backward()
        found.append((loss.detach(), own.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-14)
    assert finish_stats(stats)["router/shift_mean"] == pytest.approx(float(shift.exp().mean()), rel=1e-12)
    assert finish_stats(stats)["router/shift_floored_frac"] == pytest.approx(float((shift.exp() < 0.8).double().mean()))
