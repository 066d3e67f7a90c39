"""What is shown and recorded. metrics.jsonl is always written."""

from __future__ import annotations

from typing import Literal

from qarl.config.base import Field, Section
from qarl.config.limits import FILES, NAME, STEPS


class WandbConfig(Section):
    """Weights & Biases."""

    project: str = Field(min_length=1, max_length=NAME, description="Project name.")
    name: str | None = Field(
        None, min_length=1, max_length=NAME, description="Run name; default the run directory's name."
    )
    mode: Literal["online", "offline", "disabled"] = Field("online", description="As WANDB_MODE.")


class TrackioConfig(Section):
    """Trackio."""

    project: str = Field(min_length=1, max_length=NAME, description="Project name.")
    name: str | None = Field(
        None, min_length=1, max_length=NAME, description="Run name; default the run directory's name."
    )


class LoggingConfig(Section):
    """Recorders and console."""

    tensorboard: bool = Field(True, description="Write TensorBoard events to the run directory.")
    wandb: WandbConfig | None = Field(None, description="Log to Weights & Biases; null: off.")
    trackio: TrackioConfig | None = Field(None, description="Log to Trackio; null: off.")
    rollouts_every: int = Field(10, ge=1, le=STEPS, description="Steps between files of sampled completions.")
    samples: int = Field(8, ge=0, le=FILES, description="Completions in such a file; 0: all.")
    rollout_tensors: bool = Field(
        True, description="Beside such a file, one with the tokens and log-probs of all responses (qarl diagnose)."
    )
    console: Literal["rich", "plain", "none"] = Field(
        "rich", description="Live table and progress bars, one line per step, or nothing."
    )
