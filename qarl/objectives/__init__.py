"""Objectives: from log-probs and advantages to a loss. Pure functions of ragged packed tensors (`segments.py`).

An objective computes the value of each token, a correction multiplies it by a weight, and an aggregation reduces the
values to the loss. Each objective is one file with its formula, the keys of its `objective` section, and `surrogate`,
which computes the formula. `registry.py` lists them. This package exports the names that a custom objective needs.
"""

from qarl.objectives.common import Surrogate, SurrogateInputs, clamped_exp, log_ratio, ratio_stats, stat

__all__ = ["Surrogate", "SurrogateInputs", "clamped_exp", "log_ratio", "ratio_stats", "stat"]
