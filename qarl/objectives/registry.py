"""The objectives there are: `objective.name` chooses one. A new one is its file and its line here."""

from __future__ import annotations

from qarl.objectives.base import ObjectiveConfig
from qarl.objectives.custom import Custom
from qarl.objectives.dapo import DAPO
from qarl.objectives.dual_clip_grpo import DualClipGRPO
from qarl.objectives.grpo import GRPO
from qarl.objectives.gspo import GSPO
from qarl.objectives.mis_gspo import MisGSPO
from qarl.objectives.on_policy import OnPolicy
from qarl.objectives.positive_only import PositiveOnly
from qarl.objectives.reinforce import Reinforce
from qarl.objectives.rloo import RLOO
from qarl.objectives.sapo import SAPO
from qarl.objectives.tbpo import TBPO

OBJECTIVES: tuple[type[ObjectiveConfig], ...] = (
    TBPO,
    GRPO,
    DAPO,
    DualClipGRPO,
    GSPO,
    MisGSPO,
    SAPO,
    PositiveOnly,
    Reinforce,
    RLOO,
    OnPolicy,
    Custom,
)
BY_NAME = {str(objective.model_fields["name"].default): objective for objective in OBJECTIVES}
