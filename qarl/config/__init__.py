"""The configuration: strict pydantic models, one file per section. Imports no torch."""

from qarl.config.config import Config
from qarl.config.data import DataConfig
from qarl.config.evaluation import EvalTask, EvaluationConfig
from qarl.config.load import load_config
from qarl.config.model import ModelConfig
from qarl.config.optim import OptimConfig
from qarl.config.quant import QuantConfig
from qarl.config.reward import RewardConfig, RewardFunction
from qarl.config.rollout import RolloutConfig
from qarl.objectives.base import ObjectiveConfig
from qarl.objectives.correction_config import CorrectionConfig

__all__ = [
    "Config",
    "CorrectionConfig",
    "DataConfig",
    "EvalTask",
    "EvaluationConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimConfig",
    "QuantConfig",
    "RewardConfig",
    "RewardFunction",
    "RolloutConfig",
    "load_config",
]
