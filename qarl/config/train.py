"""The loop: how many steps, how large, how reproducible."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from qarl.config.base import Fault, Field, Renamed, Section, path_faults
from qarl.config.by_device import ByDevice, Recompute
from qarl.config.limits import EPOCHS, PROMPTS, RESPONSES, STEPS, THREADS, TOKENS
from qarl.inputs.paths import PATH_BYTES


class ProfileConfig(Section):
    """A trace of one training step, in profile/ of the run directory."""

    step: int = Field(ge=1, le=STEPS, description="The training step to trace, counted from 1.")


class TrainConfig(Section):
    """Sizes and seeds of the training loop."""

    renamed: ClassVar = {"gradient_checkpointing": Renamed("recompute", {"True": "layer", "False": "elementwise"})}

    steps: int = Field(ge=1, le=STEPS, description="Training steps: rollout, update, publish.")
    prompts_per_step: int = Field(8, ge=1, le=PROMPTS, description="Prompts per step; each gets rollout.n responses.")
    minibatch_size: int | None = Field(
        None,
        ge=1,
        le=RESPONSES,
        description="Responses per optimizer step; must divide prompts_per_step * rollout.n, which is the default.",
    )
    micro_batch_tokens: ByDevice = Field(
        None,
        ge=1,
        le=TOKENS,
        description="Tokens (prompt and response) of one forward and backward, never less than a response; null: up to "
        "16,384, as a GPU's memory allows.",
    )
    epochs: int = Field(1, ge=1, le=EPOCHS, description="Passes over a step's responses.")
    recompute: Recompute = Field(
        None,
        description="What the backward computes again instead of keeping it. elementwise: norms, rotation and "
        "activation; mlp: gate and up too; products: all products but the MLP's last; layer: everything. null: the "
        "first of them that a GPU's memory allows at 8,192 tokens. In plain torch (a CPU) the first three keep all.",
    )
    logprob_chunk: ByDevice = Field(
        None,
        ge=1,
        le=TOKENS,
        description="Rows of logits held at once, where they are: in plain torch, and where rollout.top_k or top_p "
        "ranks tokens; null: as the device's memory allows.",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of data order, sampling and everything else that is random.")
    deterministic: bool = Field(True, description="Bit-reproducible algorithms, also across a resume.")
    threads: int | None = Field(None, ge=1, le=THREADS, description="CPU threads of torch; default torch's own choice.")
    max_skipped_steps: int = Field(
        3,
        ge=0,
        le=STEPS,
        description="Consecutive optimizer steps that may be skipped for a non-finite gradient before the run ends.",
    )
    run_dir: str | None = Field(
        None,
        min_length=1,
        max_length=PATH_BYTES,
        description="Where everything is written; default runs/<config file stem>.",
    )

    profile: ProfileConfig | None = Field(
        None,
        description="Trace one step with torch.profiler: where the time of learner and publish goes; null: off.",
    )

    def faults(self) -> Iterator[Fault]:
        yield from path_faults("run_dir", self.run_dir)
        if self.profile is not None and self.profile.step > self.steps:
            text = f"the run has train.steps = {self.steps}; must be 1 to {self.steps}, or train.profile: null"
            yield Fault(("profile", "step"), self.profile.step, text)
