"""The `checkpoint` section: saving and resuming."""

from typing import Literal

from qarl.inputs.limits import FILES, STEPS
from qarl.inputs.section import Field, PathName, Section


class CheckpointConfig(Section):
    """When to save checkpoints, how many to keep, and which one to resume from."""

    every: int = Field(50, ge=1, le=STEPS, description="Training steps between checkpoints.")
    keep_last: int = Field(2, ge=0, le=FILES, description="Number of newest checkpoints to keep; 0 keeps all.")
    resume: PathName = Field(
        "auto",
        description="Checkpoint to resume from. auto: the newest intact one in the run directory, if any; never: start "
        "over; otherwise the path of a checkpoint.",
    )
    save_final: bool = Field(True, description="Also save after the last step.")
    allow_changed: list[Literal["data", "model", "reward", "objective"]] = Field(
        default_factory=list,
        max_length=4,
        description="Inputs that may differ when a run resumes. data: prompts and columns; model: weights, "
        "configuration, tokenizer, chat template, stop tokens; reward: source of the reward functions; objective: "
        "source of a custom objective, or the teacher's weights.",
    )
