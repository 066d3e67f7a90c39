"""What survives a crash."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from qarl.config.base import Fault, Field, Section, path_faults
from qarl.config.limits import FILES, STEPS
from qarl.inputs.paths import PATH_BYTES


class CheckpointConfig(Section):
    """Checkpoints: when, how many, and which one to resume from."""

    every: int = Field(50, ge=1, le=STEPS, description="Training steps between checkpoints.")
    keep_last: int = Field(2, ge=0, le=FILES, description="Newest checkpoints kept; 0 keeps all.")
    resume: str = Field(
        "auto",
        min_length=1,
        max_length=PATH_BYTES,
        description="auto: the newest intact checkpoint of the run directory, if any; never: start over; or the path "
        "of a checkpoint.",
    )
    save_final: bool = Field(True, description="Also save after the last step.")
    allow_changed: list[Literal["data", "model", "reward", "objective"]] = Field(
        default_factory=list,
        max_length=4,
        description="What may have changed since the checkpoint that a run resumes from: the data's prompts and "
        "columns; the base model's weights, configuration, tokenizer, chat template and stop tokens; the source of the "
        "reward functions; the source of your own objective. Any other change is refused.",
    )

    def faults(self) -> Iterator[Fault]:
        yield from path_faults("resume", self.resume)
