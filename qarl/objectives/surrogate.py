"""What an objective returns, and statistics that add over micro-batches.

Every statistic is a float64 tensor (sum, count). Those of two micro-batches add element by element (`add_stats`), so
the result does not depend on how a minibatch was cut; `finish_stats` divides once, at the end of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from qarl.objectives.segments import Segments

Stats = dict[str, "Tensor"]
"""Metric name -> float64 [2]: the sum and the count of what was summed."""

WEIGHT_MEAN = "correction/weight_mean"
_WEIGHT_SQ_MEAN = "correction/weight_sq_mean"  # only a step on the way to the effective sample size
_ESS = "correction/ess"

RATIO_STATS = ("policy/ratio_mean", "policy/clip_frac", "policy/ratio_clamped_frac")
"""What `ratio_stats` reports."""


@dataclass(frozen=True)
class Surrogate:
    """What an objective makes of a micro-batch.

    value: (T,) what each token is worth, to maximise (minus a loss), with gradient to the learner's log-probs.
    stats: what it counted, of `stat`, by the metric's name.
    """

    value: Tensor
    stats: Stats = field(default_factory=dict)


def stat(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """(sum, count) of `values` (any shape, bool counts as 0 and 1), of those under the bool `mask` if one is given."""
    import torch

    values = values.detach().double()
    if mask is None:
        return torch.stack([values.sum(), values.new_full((), values.numel())])
    return torch.stack([values.masked_fill(~mask, 0.0).sum(), mask.sum().double()])


def ratio_stats(ratio: Tensor, clipped: Tensor, clamped: Tensor, mask: Tensor | None) -> Stats:
    """The statistics every ratio objective reports.

    ratio, clipped (bool), clamped (bool), mask (bool or None): per token or per response, as the objective works.
    """
    return {name: stat(x, mask) for name, x in zip(RATIO_STATS, (ratio, clipped, clamped), strict=True)}


def weight_stats(weights: Tensor, mask: Tensor | None = None) -> Stats:
    """Mean and effective sample size of importance weights, one per token or response, those under `mask`."""
    return {WEIGHT_MEAN: stat(weights, mask), _WEIGHT_SQ_MEAN: stat(weights.double().square(), mask)}


def present(segments: Segments) -> Tensor:
    """bool [R]: responses with at least one token. Empty ones enter no statistic."""
    return segments.lengths > 0


def add_stats(total: Stats, part: Stats) -> Stats:
    """The statistics of two disjoint parts taken together. A name may be in one of them only."""
    return {name: _added(total.get(name), part.get(name)) for name in total | part}


def _added(a: Tensor | None, b: Tensor | None) -> Tensor:
    if a is None:
        assert b is not None, "a name of neither part"
        return b
    return a if b is None else a + b


def finish_stats(total: Stats) -> dict[str, float]:
    """Sums to metrics: each is sum / count, and 0.0 where nothing was counted.

    `correction/ess` = (sum w)^2 / (n sum w^2), in (0, 1]: 1 for equal weights, and 0.0 if every weight is 0.
    One transfer from the device.
    """
    import torch

    if not total:
        return {}
    rows = torch.stack(list(total.values())).cpu().tolist()
    metrics = {name: s / n if n else 0.0 for name, (s, n) in zip(total, rows, strict=True)}
    if _WEIGHT_SQ_MEAN in metrics:
        square = metrics.pop(_WEIGHT_SQ_MEAN)
        metrics[_ESS] = metrics[WEIGHT_MEAN] ** 2 / square if square else 0.0
    return metrics
