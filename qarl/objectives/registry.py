"""The registered objectives; `objective.name` selects one. To add one, write its file and add it here."""

from __future__ import annotations

from qarl.objectives.base import ObjectiveConfig
from qarl.objectives.custom import Custom
from qarl.objectives.gmpo import GMPO, RSPO
from qarl.objectives.grpo import DAPO, GRPO, DualClipGRPO, PositiveOnly
from qarl.objectives.gspo import GSPO, MisGSPO
from qarl.objectives.m2po import M2PO
from qarl.objectives.on_policy import OnPolicy
from qarl.objectives.reinforce import RLOO, Reinforce
from qarl.objectives.sapo import SAPO
from qarl.objectives.supervised import SFT, Distill
from qarl.objectives.tbpo import TBPO

OBJECTIVES: tuple[type[ObjectiveConfig], ...] = (
    *(TBPO, GRPO, DAPO, DualClipGRPO, GSPO, MisGSPO, GMPO, RSPO, SAPO, M2PO, PositiveOnly),
    *(Reinforce, RLOO, OnPolicy, SFT, Distill, Custom),
)
BY_NAME = {str(objective.model_fields["name"].default): objective for objective in OBJECTIVES}
