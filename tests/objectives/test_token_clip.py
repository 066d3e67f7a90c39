from dataclasses import replace

import torch
from objective_sections import objective_config
from ragged import surrogate_inputs

from qarl.objectives.common import log_ratio
from qarl.objectives.m2po import M2PO
from qarl.objectives.segments import Segments


def run(logp, logp_old, advantages, segments, objective):
    return objective.surrogate(surrogate_inputs(log_ratio(logp, logp_old), logp, advantages, segments))


def test_a_ratio_on_the_edge_keeps_its_whole_gradient():
    logp = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    on_edge = objective_config(name="grpo", clip_ratio_low=0.0, clip_ratio_high=0.0)
    advantages, segments = torch.tensor([2.0]).double(), Segments.from_lengths([1])
    run(logp, torch.zeros(1).double(), advantages, segments, on_edge).value.sum().backward()
    assert logp.grad.item() == 2.0


def test_m2po_drops_all_tokens_that_tie_at_the_limit() -> None:
    moved, segments = torch.tensor([0.0, 0.0, 0.3, -0.3], dtype=torch.float64), Segments.from_lengths([4])
    given = surrogate_inputs(moved, torch.zeros(4).double(), torch.tensor([1.0]).double(), segments)
    objective = M2PO(m2_threshold=0.04)
    edge = objective.center(given)
    assert edge == 0.0  # with both of the tie the mean of (log r)^2 is 0.045
    assert objective.center(replace(given, log_ratio=moved / 2)) == 0.15
    value = objective.surrogate(replace(given, center=edge)).value
    assert value.tolist() == [1.0, 1.0, 0.0, 0.0]
