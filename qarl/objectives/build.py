"""From the `objective` and `correction` sections to the objective they describe."""

from __future__ import annotations

from qarl.objectives.base import ObjectiveConfig
from qarl.objectives.correction.combined import Correction
from qarl.objectives.correction.config import CorrectionConfig
from qarl.objectives.objective import Objective


def build_objective(config: ObjectiveConfig, correction: CorrectionConfig) -> Objective:
    """The objective that the two sections describe.

    Raises UserError for an objective of the user's that cannot be imported.
    """
    return Objective(
        config,
        surrogate=config.bind(),
        correction=config.corrected(Correction.from_config(correction)),
        pruning=config.dvp_outside or config.default_pruning(correction.level),
    )
