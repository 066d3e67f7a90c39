"""Objectives: from log-probs and advantages to a loss. Pure functions of ragged packed tensors (see segments.py).

An objective says what a token is worth (`Surrogate`); a correction multiplies it; an aggregation adds it up. Each is a
class in a file of its own, with the keys of its `objective` section above its maths; `registry.py` lists them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# First, whichever of the two is imported first: the configuration is made of the sections here, and they of its base.
import qarl.config  # noqa: F401
from qarl.objectives.aggregate import Totals
from qarl.objectives.band import Band
from qarl.objectives.base import ObjectiveConfig
from qarl.objectives.ratios import clamped_exp, log_ratio
from qarl.objectives.segments import Segments
from qarl.objectives.surrogate import Stats, Surrogate, add_stats, finish_stats, ratio_stats, stat
from qarl.objectives.tokens import Constants, Needs, SurrogateInputs, TokenLogProbs

if TYPE_CHECKING:
    from qarl.objectives.advantages import compute_advantages
    from qarl.objectives.build import build_objective
    from qarl.objectives.objective import Objective

__all__ = [
    "Band",
    "Constants",
    "Needs",
    "Objective",
    "ObjectiveConfig",
    "Segments",
    "Stats",
    "Surrogate",
    "SurrogateInputs",
    "TokenLogProbs",
    "Totals",
    "add_stats",
    "build_objective",
    "clamped_exp",
    "compute_advantages",
    "finish_stats",
    "log_ratio",
    "ratio_stats",
    "stat",
]

_WITH_TORCH = {"Objective": "objective", "build_objective": "build", "compute_advantages": "advantages"}


def __getattr__(name: str) -> Any:
    """What loads torch, once it is asked for: `qarl check` reads the classes here, and goes without."""
    if name in _WITH_TORCH:
        return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
