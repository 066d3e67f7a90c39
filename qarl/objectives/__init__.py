"""Objectives: from log-probs and advantages to a loss. Pure functions of ragged packed tensors (`segments.py`).

An objective computes the value of each token, a correction multiplies it with a weight, and an aggregation reduces it
to the loss. An objective is one file: its formula, the keys of its `objective` section, and `surrogate`, which computes
the formula. `registry.py` lists them. Exported here is what a user's own objective needs.
"""

# The configuration contains the sections here, and they need its base classes: it has to be imported first.
import qarl.config  # noqa: F401
from qarl.objectives.common import Surrogate, SurrogateInputs, clamped_exp, log_ratio, ratio_stats, stat

__all__ = ["Surrogate", "SurrogateInputs", "clamped_exp", "log_ratio", "ratio_stats", "stat"]
