"""Objectives: from log-probs and advantages to a loss. Pure functions of ragged packed tensors (`segments.py`).

An objective computes the value of each token, a correction multiplies it with a weight, and an aggregation reduces it
to the loss. An objective is one file: its formula, the keys of its `objective` section, and `surrogate`, which computes
the formula. `registry.py` lists them. What loads torch is imported on first use, because `qarl check` needs the keys
only.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# The configuration contains the sections here, and they need its base classes: it has to be imported first.
import qarl.config  # noqa: F401
from qarl.objectives.base import Band, ObjectiveConfig
from qarl.objectives.common import (
    Constants,
    Needs,
    Pruned,
    Stats,
    Surrogate,
    SurrogateInputs,
    TokenLogProbs,
    add_stats,
    clamped_exp,
    finish_stats,
    log_ratio,
    ratio_stats,
    stat,
)
from qarl.objectives.segments import Segments, Totals

if TYPE_CHECKING:
    from qarl.objectives.advantages import compute_advantages
    from qarl.objectives.objective import Objective, build_objective

__all__ = [
    "Band",
    "Constants",
    "Needs",
    "Objective",
    "ObjectiveConfig",
    "Pruned",
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

_WITH_TORCH = {"Objective": "objective", "build_objective": "objective", "compute_advantages": "advantages"}


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
