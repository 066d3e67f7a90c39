"""The `train` section: number and size of steps, seeds, reproducibility."""

from collections.abc import Iterator
from typing import ClassVar

from qarl.config.by_device import ByDevice, Recompute
from qarl.inputs.limits import EPOCHS, PROMPTS, RESPONSES, STEPS, THREADS, TOKENS
from qarl.inputs.section import Fault, Field, PathName, Renamed, Section


class ProfileConfig(Section):
    """A trace of one training step, in profile/ of the run directory."""

    step: int = Field(ge=1, le=STEPS, description="The training step to trace, counted from 1.")


class TrainConfig(Section):
    """Sizes and seeds of the training loop."""

    renamed: ClassVar = {"gradient_checkpointing": Renamed("recompute", {"True": "layer", "False": "elementwise"})}

    steps: int = Field(ge=1, le=STEPS, description="Number of training steps (rollout, update, publish).")
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
        description="Tokens (prompt and response) per forward and backward, at least one response; null: up to 16,384 "
        "(65,536 for small models), depending on GPU memory.",
    )
    epochs: int = Field(1, ge=1, le=EPOCHS, description="Passes over the responses of a step (PPO epochs).")
    recompute: Recompute = Field(
        None,
        description="Activations that the backward recomputes instead of storing. elementwise: norms, rotary "
        "embedding, activation function; mlp: also gate and up; products: all matrix products but down; "
        "layer: everything. null: the first with which 8,192 tokens or more fit GPU memory, or layer.",
    )
    logprob_chunk: ByDevice = Field(
        None,
        ge=1,
        le=TOKENS,
        description="Tokens whose logits are in memory at once. Applies in plain torch, and if rollout.top_k or top_p "
        "is used. null: 128 on a CPU, 128 to 4,096 on a GPU, depending on its memory.",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of data order, sampling and all other randomness.")
    deterministic: bool = Field(
        True,
        description="Use deterministic algorithms: the same configuration gives the same bits, also after a resume.",
    )
    threads: int | None = Field(None, ge=1, le=THREADS, description="CPU threads of torch; null: torch's default.")
    max_skipped_steps: int = Field(
        3,
        ge=0,
        le=STEPS,
        description="Maximum consecutive optimizer steps skipped because of a non-finite gradient; one more ends the "
        "run.",
    )
    run_dir: PathName | None = Field(
        None,
        description="Run directory for all outputs; default: runs/<config file stem>.",
    )

    profile: ProfileConfig | None = Field(
        None,
        description="Trace one step of learner and publish with torch.profiler; null: off.",
    )

    def faults(self) -> Iterator[Fault]:
        if self.profile is not None and self.profile.step > self.steps:
            text = f"the run has train.steps = {self.steps}; must be 1 to {self.steps}, or train.profile: null"
            yield self.fault("profile.step", text)
