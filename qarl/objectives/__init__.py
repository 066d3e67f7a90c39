"""Objectives: from log-probs and advantages to a loss. Pure functions of ragged packed tensors (see segments.py).

An objective says what a token is worth (`Surrogate`); a correction multiplies it; an aggregation adds it up.
"""

from __future__ import annotations

from qarl.objectives.advantages import compute_advantages
from qarl.objectives.aggregate import Totals
from qarl.objectives.band import Band
from qarl.objectives.build import build_objective
from qarl.objectives.objective import Objective
from qarl.objectives.segments import Segments
from qarl.objectives.surrogate import Stats, add_stats, finish_stats
from qarl.objectives.tokens import Constants, Needs, TokenLogProbs

__all__ = [
    "Band",
    "Constants",
    "Needs",
    "Objective",
    "Segments",
    "Stats",
    "TokenLogProbs",
    "Totals",
    "add_stats",
    "build_objective",
    "compute_advantages",
    "finish_stats",
]
