"""The `evaluation` section: tasks, schedule and sampling parameters."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import JsonValue

from qarl.config.data import DataConfig, is_generator, template_argument_faults
from qarl.config.evaluation_presets import PRESETS, unknown_preset
from qarl.config.reward import RewardFunction, shadowed_column_faults
from qarl.config.rollout import MinP, TopK, TopP
from qarl.inputs.limits import (
    ITEMS,
    NAME,
    ROWS,
    SAMPLES,
    SCORE,
    SMALLEST_TEMPERATURE,
    STEPS,
    TEMPERATURE,
    TOKENS,
)
from qarl.inputs.section import Fault, Field, Name, PathName, Section

TASK_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # goes into metric names and file names
TASK_NAME_LENGTH = 100  # short enough for a file name to hold several


class EvalTask(Section):
    """One set of prompts with its reward: a preset, or a data section with reward functions."""

    preset: str | None = Field(None, max_length=NAME, description=f"Built-in evaluation set: {', '.join(PRESETS)}.")
    path: PathName | None = Field(
        None,
        description="Local file or directory with the preset's columns; replaces the hub dataset.",
    )
    name: str | None = Field(
        None,
        pattern=TASK_NAME,
        max_length=TASK_NAME_LENGTH,
        description="Name in reports and metrics; default: the name of the preset.",
    )
    data: DataConfig | None = Field(None, description="Prompts of a custom set.")
    reward: list[RewardFunction] = Field([], max_length=ITEMS, description="Reward functions of a custom set.")
    chat_template_kwargs: dict[str, JsonValue] = Field(
        {},
        max_length=ITEMS,
        description="Arguments of the chat template, for presets only; custom sets give them in `data`.",
    )
    max_prompts: int | None = Field(
        None, ge=1, le=ROWS, description="Use only the first prompts, at most this many; null: all."
    )

    def faults(self) -> Iterator[Fault]:
        yield from template_argument_faults(self.chat_template_kwargs)
        if self.preset is None:
            if self.data is not None:
                for fault in shadowed_column_faults(self.data.columns, self.reward):
                    yield Fault(("data", "columns", *fault.key), fault.value, fault.text)
            if self.data is None:
                yield self.fault("preset", f"give a preset ({', '.join(PRESETS)}), or name, data and reward")
                return
            if self.name is None:
                yield self.fault("name", "a task with its own data needs a name")
            if not self.reward:
                yield self.fault("reward", "a task with its own data needs its reward functions")
            if self.chat_template_kwargs:
                yield self.fault("chat_template_kwargs", "are for a preset; here, set data.chat_template_kwargs")
            if self.path is not None:
                yield self.fault("path", "replaces a preset's hub set; here, set data.source")
            return
        if self.path is not None and is_generator(self.path):
            yield self.fault("path", "is a task generator; give a file or directory with the preset's columns")
        if self.preset not in PRESETS:
            yield self.fault("preset", unknown_preset(self.preset))
        if self.data is not None:
            yield Fault(("data",), self.data.source, "a preset brings its data; leave out preset, or data")
        if self.reward:
            yield Fault(("reward",), self.reward[0].name, "a preset brings its reward; leave out preset, or reward")

    def resolved(self) -> dict[str, Any]:
        return {"name": self.preset} if self.name is None else {}

    @property
    def dataset(self) -> DataConfig:
        """The `data` section: the preset's or the task's own, limited to `max_prompts` rows."""
        data = self.data or DataConfig.model_validate(PRESETS[str(self.preset)].data(self.path))
        limits = [limit for limit in (data.max_rows, self.max_prompts) if limit is not None]
        kwargs = data.chat_template_kwargs or self.chat_template_kwargs
        return data.model_copy(update={"max_rows": min(limits, default=None), "chat_template_kwargs": kwargs})

    @property
    def functions(self) -> list[RewardFunction]:
        """The reward functions: the preset's or the task's own."""
        if self.preset is None:
            return self.reward
        return [RewardFunction.model_validate(function) for function in PRESETS[self.preset].reward]


class EvaluationConfig(Section):
    """Evaluations of the published, quantized policy. They do not affect training."""

    tasks: list[EvalTask] = Field([], max_length=ITEMS, description="Evaluation tasks; empty: no evaluation.")
    held_out: DataConfig | None = Field(
        None,
        description="Data whose given responses are scored: loss per token, and the divergence from objective.teacher.",
    )
    every: int | None = Field(
        None, ge=1, le=STEPS, description="Training steps between evaluations; null: none during training."
    )
    before_training: bool = Field(True, description="Evaluate the policy that training starts from (step 0).")
    at_end: bool = Field(True, description="Evaluate after the last step.")
    samples: int = Field(4, ge=1, le=SAMPLES, description="Responses per prompt (the k of avg@k).")
    pass_at: list[Annotated[int, Field(ge=1, le=SAMPLES)]] | None = Field(
        None, min_length=1, max_length=ITEMS, description="Values of k for pass@k; null: 1 and `samples`."
    )
    temperature: float = Field(
        1.0, ge=0, le=TEMPERATURE, description="Sampling temperature; 0 is greedy and requires samples: 1."
    )
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    max_response_length: int | None = Field(
        None, ge=1, le=TOKENS, description="Maximum response length in tokens; null: rollout.max_response_length."
    )
    stop: list[Name] | None = Field(
        None, max_length=ITEMS, description="Strings that end a response; null: those of rollout.stop."
    )
    seed: int = Field(
        0, ge=0, lt=2**63, description="Random seed. Each task, prompt and sample has its own random stream."
    )
    correct_threshold: float = Field(
        1.0,
        ge=-SCORE,
        le=SCORE,
        description="A completion is correct if its total reward is at least this; presets always use 1.",
    )

    def faults(self) -> Iterator[Fault]:
        for index, k in enumerate(self.pass_at or []):
            if k > self.samples:
                yield Fault(("pass_at", index), k, f"must be {self.samples} (samples) or less, or draw more samples")
        if 0 < self.temperature < SMALLEST_TEMPERATURE:
            yield self.fault("temperature", f"must be 0 (greedy), or {SMALLEST_TEMPERATURE:g} or more")
        if self.temperature == 0 and self.samples > 1:
            yield self.fault("samples", "greedy responses (temperature 0) are all the same; must be 1")
        seen: set[str | None] = set()
        for index, task in enumerate(self.tasks):
            if task.name in seen:
                text = "is the name of an earlier task too; give each its own"
                yield Fault(("tasks", index, "name"), task.name, text)
            seen.add(task.name)
        if self.every is not None and not self.measures:
            yield self.fault("every", "there is nothing to evaluate; set evaluation.tasks, or leave it null")

    def resolved(self) -> dict[str, Any]:
        return {"pass_at": sorted({1, self.samples})} if self.pass_at is None else {}

    @property
    def measures(self) -> bool:
        """Whether there is anything to evaluate."""
        return bool(self.tasks) or self.held_out is not None

    def due(self, step: int, last_step: int) -> bool:
        """Whether to evaluate the policy after `step` of `last_step` training steps."""
        if not self.measures:
            return False
        if step == 0:
            return self.before_training
        return (step == last_step and self.at_end) or (self.every is not None and step % self.every == 0)
