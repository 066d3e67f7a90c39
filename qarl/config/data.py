"""The `data` section: prompts, columns and templates."""

import keyword
import re
import string
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import JsonValue

from qarl.config.messages import validated
from qarl.config.reward import RESERVED_ARGUMENTS
from qarl.inputs.limits import ITEMS, ROWS, SCORE, TEXT, TOKENS
from qarl.inputs.section import Fault, Field, Name, PathName, Section

LOCAL_SUFFIXES = (".json", ".jsonl", ".parquet", ".csv")
TASKS = ("arithmetic",)
RESERVED_COLUMNS = RESERVED_ARGUMENTS | {"prompt"}  # no data column can have one of these names
TEMPLATE_OPTION = "--chat-template-kwargs"  # option name for messages
WIDTH_LIMIT = 1000  # characters per field of data.prompt_template


# Arguments of transformers' `apply_chat_template`, names that it gives to templates, and jinja's own globals.
RESERVED_TEMPLATE_ARGUMENTS = re.findall(
    r"\w+",
    "self conversation conversations messages tools documents chat_template add_generation_prompt "
    "continue_final_message tokenize padding truncation max_length return_tensors return_dict "
    "return_assistant_tokens_mask tokenizer_kwargs bos_token eos_token unk_token sep_token pad_token cls_token "
    "mask_token additional_special_tokens strftime_now raise_exception range dict lipsum cycler joiner namespace "
    "loop caller varargs kwargs true false none True False None",
)


def is_generator(source: str) -> bool:
    """Whether a task generator creates the source's rows."""
    return source.startswith(("task:", "reasoning-gym:"))


def template_argument_faults(arguments: Mapping[str, JsonValue]) -> Iterator[Fault]:
    """Names in `chat_template_kwargs` that cannot be arguments of a chat template."""
    key = "chat_template_kwargs"
    for name in arguments:
        if name in RESERVED_TEMPLATE_ARGUMENTS:
            yield Fault((key, name), arguments[name], "is set by qarl or the tokenizer; leave it out")
        elif not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name) or name.startswith("__"):
            yield Fault((key, name), arguments[name], "is not the name of a template variable, such as enable_thinking")


def template_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Validate the arguments in --chat-template-kwargs. Raises UserError."""
    values = {"source": "task:arithmetic", "chat_template_kwargs": dict(arguments)}
    return validated(DataConfig, values, lambda loc: TEMPLATE_OPTION).chat_template_kwargs


class ChoicesConfig(Section):
    """Multiple-choice rows. Adds the columns `choices` (lettered options) and `answer` (letter of the correct one)."""

    options: list[Name] = Field(
        min_length=1,
        max_length=26,
        description="Column with the list of options (e.g. choices.text), or one column per option.",
    )
    right: Name | None = Field(
        None,
        description="Column with the correct option: its label, letter, 0-based index or text. null: the first option.",
    )
    labels: Name | None = Field(None, description="Column with the list of labels; null: A, B, C, ...")
    shuffle_seed: int | None = Field(
        None, ge=0, lt=2**31, description="Seed that shuffles the options of each row; null: keep their order."
    )


Rate = Annotated[float, Field(ge=-SCORE, le=SCORE)]


class DataConfig(Section):
    """The prompts, their columns and their template."""

    source: PathName = Field(
        description="Hub dataset name; local .json, .jsonl, .parquet or .csv (file, or directory of them); "
        "`task:arithmetic`; or `reasoning-gym:NAME`.",
    )
    split: Name = Field("train", description="Split of the dataset.")
    subset: Name | None = Field(
        None, description="Configuration name of a hub dataset (`name` in datasets.load_dataset)."
    )
    task: dict[str, JsonValue] = Field(
        {}, description="Keyword arguments of the task generator, e.g. {size: 1000, seed: 0}."
    )
    columns: dict[str, Name] = Field(
        {},
        max_length=ITEMS,
        description="Rename columns: new name -> dataset column or nested field, e.g. {prompt: question, answer: "
        "reward_model.ground_truth}. The result must have a column `prompt`.",
    )
    response: Name | None = Field(
        None,
        description="Column with the given response (text or messages), for `qarl sft` and `qarl distill` with "
        "rollout.engine: data. null: the first of completion, response, messages and text.",
    )
    choices: ChoicesConfig | None = Field(
        None, description="Options of multiple-choice rows, shown by {choices} in prompt_template; null: off."
    )
    prompt_template: str | None = Field(
        None,
        min_length=1,
        max_length=TEXT,
        description="str.format template that makes the prompt from the row's columns, e.g. '{prompt} ='. null: the "
        "column `prompt`.",
    )
    chat_template: bool = Field(True, description="Wrap the prompt in the tokenizer's chat template.")
    system_prompt: str | None = Field(None, max_length=TEXT, description="System message of the chat template.")
    chat_template_kwargs: dict[str, JsonValue] = Field(
        {},
        max_length=ITEMS,
        description="Arguments of the chat template, e.g. {enable_thinking: false}. Loading fails if the template "
        "does not use one of them.",
    )
    max_prompt_length: int = Field(
        512, ge=1, le=TOKENS, description="Maximum prompt length in tokens; longer rows are dropped and counted."
    )
    max_rows: int | None = Field(
        None, ge=1, le=ROWS, description="Use only the first rows of the source, at most this many; null: all."
    )
    pass_rate: tuple[Rate, Rate] | None = Field(
        None,
        strict=False,
        description="Difficulty filter [low, high], e.g. [0.1, 0.9]: skip a prompt if the mean reward of its last "
        "responses is outside this range. Applies from the prompt's second use on. null: off.",
    )
    shuffle: bool = Field(
        True, description="Shuffle the rows every epoch, seeded by train.seed; false: keep the source's order."
    )

    @property
    def kind(self) -> Literal["task", "reasoning_gym", "local", "hub"]:
        """Type of `source`, judged by its spelling only: a directory with a hub-like name counts as hub."""
        if self.source.startswith("task:"):
            return "task"
        if self.source.startswith("reasoning-gym:"):
            return "reasoning_gym"
        looks_like_a_path = self.source.startswith((".", "/", "~")) or self.source.count("/") > 1
        return "local" if looks_like_a_path or PurePath(self.source).suffix.lower() in LOCAL_SUFFIXES else "hub"

    def faults(self) -> Iterator[Fault]:
        if self.choices is not None and "{choices" not in (self.prompt_template or ""):
            yield self.fault("prompt_template", "the options are not shown; use {choices} in data.prompt_template")
        if self.pass_rate is not None and self.pass_rate[0] > self.pass_rate[1]:
            yield self.fault("pass_rate", "must be [low, high] with low <= high")
        generated = is_generator(self.source)
        if self.kind == "task" and self.source.removeprefix("task:") not in TASKS:
            yield self.fault("source", f"unknown task; use {' or '.join('task:' + name for name in TASKS)}")
        if self.source == "reasoning-gym:":
            yield self.fault("source", "must name a generator, e.g. reasoning-gym:basic_arithmetic")
        if generated and self.subset is not None:
            yield self.fault("subset", "only a hub dataset has subsets; leave null for a task generator")
        if generated and self.split != "train":
            yield self.fault("split", "a task generator has no splits; must be train")
        if self.task and not generated:
            yield self.fault("task", "is for task:NAME and reasoning-gym:NAME sources; leave {} for a dataset")
        if self.system_prompt is not None and not self.chat_template:
            yield self.fault("system_prompt", "is part of the chat template; set data.chat_template: true")
        for name in sorted((RESERVED_COLUMNS - {"prompt"}) & self.columns.keys()):
            text = "is an argument that every reward function is called with; choose another name"
            yield Fault(("columns", name), self.columns[name], text)
        yield from template_argument_faults(self.chat_template_kwargs)
        if self.chat_template_kwargs and not self.chat_template:
            yield self.fault("chat_template_kwargs", "are arguments of the chat template; set data.chat_template: true")
        if self.prompt_template is not None:
            yield from self._template_faults(self.prompt_template)

    def _template_faults(self, template: str) -> Iterator[Fault]:
        try:
            names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        except ValueError as error:
            yield self.fault("prompt_template", f"is not a str.format template ({error}); write {{{{ for a brace")
            return
        if not names:
            yield self.fault("prompt_template", 'must use a column, e.g. "{prompt} ="')
        if any(not name.isidentifier() for name in names):
            yield self.fault("prompt_template", "fields must be column names; write {{ for a brace")
        for spec in (spec for _, _, spec, _ in string.Formatter().parse(template) if spec):
            if "{" in spec:
                yield self.fault("prompt_template", "a width or precision must be a number, not a field")
            elif any(len(digits) > 4 or int(digits) > WIDTH_LIMIT for digits in re.findall("[0-9]+", spec)):
                yield self.fault("prompt_template", f"a width or precision can be at most {WIDTH_LIMIT:,}")
