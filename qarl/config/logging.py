"""The `logging` section. metrics.jsonl is always written."""

from typing import Literal

from qarl.inputs.limits import FILES, STEPS, TEXT
from qarl.inputs.section import Field, Name, Section


class TrackerConfig(Section):
    """Keys of every tracker."""

    project: Name = Field(description="Name of the project; in MLflow of the experiment.")
    name: Name | None = Field(None, description="Name of the run; null: the run directory's name.")


class WandbConfig(TrackerConfig):
    """Weights & Biases."""

    mode: Literal["online", "offline", "disabled"] = Field("online", description="Mode of wandb.init (WANDB_MODE).")


class MlflowConfig(TrackerConfig):
    """MLflow."""

    tracking_uri: str | None = Field(
        None, min_length=1, max_length=TEXT, description="Tracking server or directory; null: MLFLOW_TRACKING_URI."
    )


class SwanlabConfig(TrackerConfig):
    """SwanLab."""

    mode: Literal["cloud", "local", "offline", "disabled"] = Field("cloud", description="Mode of swanlab.init.")


class LoggingConfig(Section):
    """Metric recorders and console output."""

    tensorboard: bool = Field(True, description="Write TensorBoard events to the run directory.")
    wandb: WandbConfig | None = Field(None, description="Log to Weights & Biases; null: off.")
    trackio: TrackerConfig | None = Field(None, description="Log to Trackio; null: off.")
    mlflow: MlflowConfig | None = Field(None, description="Log to MLflow; null: off.")
    swanlab: SwanlabConfig | None = Field(None, description="Log to SwanLab; null: off.")
    rollouts_every: int = Field(
        10, ge=1, le=STEPS, description="Training steps between files of sampled completions, rollouts/NNNNNN.jsonl."
    )
    samples: int = Field(8, ge=0, le=FILES, description="Completions per file in rollouts/; 0: all.")
    rollout_tensors: bool = Field(
        True, description="Also save tokens and log-probs of all responses in these steps (for qarl diagnose)."
    )
    console: Literal["rich", "plain", "none"] = Field(
        "rich", description="Live table and progress bars, one line per step, or nothing."
    )
