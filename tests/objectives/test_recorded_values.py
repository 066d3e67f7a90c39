"""Losses, gradients, rejections and estimates that verl and TRL compute on the same numbers (recorded_values.json).

The file names their functions and commits. Both divide by counts plus 1e-8 in places, which is the tolerance.
"""

import json
from pathlib import Path

import pytest
import torch
from objective_sections import objective_config

from qarl.config import CorrectionConfig
from qarl.objectives.common import TokenLogProbs, k_estimate, log_ratio
from qarl.objectives.correction import kept
from qarl.objectives.correction_config import RejectRule
from qarl.objectives.objective import build_objective
from qarl.objectives.segments import Segments, Totals

RECORDED = json.loads((Path(__file__).parent / "recorded_values.json").read_text())
INPUTS = RECORDED["inputs"]
LENGTHS = INPUTS["lengths"]
TOLERANCE = {"rtol": 2e-8, "atol": 1e-12}


def column(name: str) -> torch.Tensor:
    return torch.tensor(INPUTS[name], dtype=torch.float64)


def evaluate(objective_options: dict, correction: CorrectionConfig, max_tokens: int) -> tuple[float, list[float]]:
    logp = column("logp").requires_grad_()
    logps = TokenLogProbs(logp, column("logp_old"), column("logp_sampler"), logp_ref=column("logp_ref"))
    objective = build_objective(objective_config(**objective_options), correction)
    arguments = (logps, column("advantages"), Segments.from_lengths(LENGTHS))
    totals = Totals(len(LENGTHS), sum(LENGTHS), max_tokens)
    loss, _ = objective(*arguments, totals, objective.constants(*arguments))
    loss.backward()
    return loss.item(), logp.grad


@pytest.mark.parametrize(
    "case", RECORDED["losses"], ids=[f"{case['source']}-{case['correction']}" for case in RECORDED["losses"]]
)
def test_loss_and_gradient_are_those_recorded(case):
    max_tokens = INPUTS["max_tokens"][case["source"].split()[0]]
    loss, gradient = evaluate(case["objective"], CorrectionConfig(**case["correction"]), max_tokens)
    assert loss == pytest.approx(case["loss"], abs=TOLERANCE["rtol"])  # a sum of terms of order 1
    torch.testing.assert_close(gradient, torch.tensor(case["gradient"], dtype=torch.float64), **TOLERANCE)


def passed(rules: list[dict]) -> list[bool]:
    delta = log_ratio(column("logp_old"), column("logp_sampler"))
    keep = torch.ones(len(LENGTHS), dtype=torch.bool)
    for rule in rules:
        keep &= kept(delta, Segments.from_lengths(LENGTHS), RejectRule(signal="corr", **rule))[0]
    return keep.tolist()


@pytest.mark.parametrize("case", RECORDED["rejections"], ids=lambda case: case["source"].split()[-1])
def test_rejected_responses_are_those_recorded(case):
    assert passed(case["reject"]) == case["kept"]


@pytest.mark.parametrize("case", RECORDED["kl"], ids=lambda case: case["estimator"])
def test_estimates_of_the_kl_to_a_reference_are_those_recorded(case):
    got = k_estimate(log_ratio(column("logp_ref"), column("logp")), case["estimator"])
    torch.testing.assert_close(got, torch.tensor(case["values"], dtype=torch.float64), rtol=1e-12, atol=1e-15)


def test_rejected_tokens_stay_in_the_denominator_where_verl_takes_them_out():
    case = RECORDED["denominators"]
    correction = CorrectionConfig(reject=[RejectRule(**rule) for rule in case["reject"]])
    loss, _ = evaluate(case["objective"], correction, max_tokens=1)
    assert case["tokens_kept"] < sum(LENGTHS)
    assert loss * sum(LENGTHS) == pytest.approx(case["loss"] * case["tokens_kept"], rel=TOLERANCE["rtol"])
