"""Where prompts come from."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import JsonValue

from qarl.config.base import Fault, Field, Section, path_faults
from qarl.config.limits import ITEMS, NAME, ROWS, TEXT, TOKENS
from qarl.inputs.paths import PATH_BYTES

LOCAL_SUFFIXES = (".json", ".jsonl", ".parquet", ".csv")
TASKS = ("arithmetic",)
WIDTH_LIMIT = 1000  # of a field of data.prompt_template, in characters


class DataConfig(Section):
    """The prompts, their columns and their template."""

    source: str = Field(
        min_length=1,
        max_length=PATH_BYTES,
        description="Hub dataset name; local .json, .jsonl, .parquet or .csv (file, or directory of them); "
        "`task:arithmetic`; or `reasoning-gym:NAME`.",
    )
    split: str = Field("train", min_length=1, max_length=NAME, description="Split of a dataset.")
    subset: str | None = Field(None, min_length=1, max_length=NAME, description="Configuration name of a hub dataset.")
    task: dict[str, JsonValue] = Field({}, description="Keyword arguments of the task generator (size, seed, ...).")
    columns: dict[str, Annotated[str, Field(min_length=1, max_length=NAME)]] = Field(
        {},
        max_length=ITEMS,
        description="Our name -> dataset column, or a field inside one, e.g. {prompt: question, answer: "
        "reward_model.ground_truth}. A `prompt` must exist afterwards.",
    )
    prompt_template: str | None = Field(
        None,
        min_length=1,
        max_length=TEXT,
        description="str.format template over the row's columns, e.g. '{prompt} ='.",
    )
    chat_template: bool = Field(True, description="Wrap the prompt in the tokenizer's chat template.")
    system_prompt: str | None = Field(None, max_length=TEXT, description="System message of the chat template.")
    max_prompt_length: int = Field(
        512, ge=1, le=TOKENS, description="Tokens; rows with longer prompts are dropped and counted."
    )
    max_rows: int | None = Field(None, ge=1, le=ROWS, description="Use only the first rows of the source.")
    shuffle: bool = Field(True, description="New order every epoch, from train.seed; false: in the source's order.")

    @property
    def kind(self) -> Literal["task", "reasoning_gym", "local", "hub"]:
        """What `source` names, judged by its spelling alone (a directory with a hub-like name counts as hub)."""
        if self.source.startswith("task:"):
            return "task"
        if self.source.startswith("reasoning-gym:"):
            return "reasoning_gym"
        looks_like_a_path = self.source.startswith((".", "/", "~")) or self.source.count("/") > 1
        return "local" if looks_like_a_path or PurePath(self.source).suffix.lower() in LOCAL_SUFFIXES else "hub"

    def faults(self) -> Iterator[Fault]:
        yield from path_faults("source", self.source)
        generated = self.kind in ("task", "reasoning_gym")
        if self.kind == "task" and self.source.removeprefix("task:") not in TASKS:
            yield Fault(("source",), self.source, f"unknown task; use {' or '.join('task:' + name for name in TASKS)}")
        if self.source == "reasoning-gym:":
            yield Fault(("source",), self.source, "must name a generator, e.g. reasoning-gym:basic_arithmetic")
        if generated and self.subset is not None:
            yield Fault(("subset",), self.subset, "only a hub dataset has subsets; leave null for a task generator")
        if generated and self.split != "train":
            yield Fault(("split",), self.split, "a task generator has no splits; must be train")
        if self.task and not generated:
            yield Fault(("task",), self.task, "is for task:NAME and reasoning-gym:NAME sources; leave {} for a dataset")
        if self.system_prompt is not None and not self.chat_template:
            yield Fault(
                ("system_prompt",), self.system_prompt, "is part of the chat template; set data.chat_template: true"
            )
        if self.prompt_template is not None:
            yield from self._template_faults(self.prompt_template)

    def _template_faults(self, template: str) -> Iterator[Fault]:
        try:
            names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        except ValueError as error:
            text = f"is not a str.format template ({error}); write {{{{ for a brace"
            yield Fault(("prompt_template",), template, text)
            return
        if not names:
            yield Fault(("prompt_template",), template, 'must use a column, e.g. "{prompt} ="')
        if any(not name.isidentifier() for name in names):
            yield Fault(("prompt_template",), template, "fields must be column names; write {{ for a brace")
        for spec in (spec for _, _, spec, _ in string.Formatter().parse(template) if spec):
            if "{" in spec:
                yield Fault(("prompt_template",), template, "a width or precision must be a number, not a field")
            elif any(len(digits) > 4 or int(digits) > WIDTH_LIMIT for digits in re.findall("[0-9]+", spec)):
                yield Fault(("prompt_template",), template, f"a width or precision can be at most {WIDTH_LIMIT:,}")
