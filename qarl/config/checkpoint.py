"""What survives a crash."""

from __future__ import annotations

from qarl.config.base import Field, Section


class CheckpointConfig(Section):
    """Checkpoints: when, how many, and which one to go on from."""

    every: int = Field(50, ge=1, description="Steps between checkpoints.")
    keep_last: int = Field(2, ge=0, description="Newest checkpoints kept; 0 keeps all.")
    resume: str = Field(
        "auto",
        min_length=1,
        description="auto: the newest intact checkpoint of the run directory, if any; never: start over; or the path "
        "of a checkpoint.",
    )
    save_final: bool = Field(True, description="Also save after the last step.")
