"""The `reward` section."""

import difflib
from collections.abc import Iterator, Mapping, Sequence

from pydantic import JsonValue

from qarl.inputs.code import REFERENCE, file_of
from qarl.inputs.limits import FACTOR, ITEMS, SECONDS, WORKERS
from qarl.inputs.paths import PATH_BYTES
from qarl.inputs.section import Fault, Field, Section, path_faults

BUILTIN_REWARDS = ("math", "choice", "code", "exact", "regex", "length", "overlong", "format", "reasoning_gym")
RESERVED_ARGUMENTS = frozenset({"completions", "prompts", "completion_ids"})
"""Arguments that every reward function receives from qarl. No option and no data column can have one of these names."""


class RewardFunction(Section):
    """One reward function and its weight in the sum."""

    name: str = Field(
        min_length=1,
        max_length=PATH_BYTES,
        description=f"Built-in ({', '.join(BUILTIN_REWARDS)}), path/to/file.py:function, or package.module:function.",
    )
    weight: float = Field(1.0, ge=-FACTOR, le=FACTOR, description="Weight in the total reward; 0 only logs the score.")
    options: dict[str, JsonValue] = Field({}, description="Keyword arguments of the function.")

    @property
    def builtin(self) -> bool:
        return self.name in BUILTIN_REWARDS

    @property
    def file(self) -> str | None:
        """Path of the Python file, for `file.py:function`; else None."""
        return file_of(self.name)

    def faults(self) -> Iterator[Fault]:
        yield from path_faults("name", self.file)
        for name in sorted(RESERVED_ARGUMENTS & self.options.keys()):
            yield Fault(
                ("options", name), self.options[name], "is an argument of every reward function; rename the option"
            )
        if self.builtin or REFERENCE.fullmatch(self.name):
            return
        near = difflib.get_close_matches(self.name, BUILTIN_REWARDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use {', '.join(BUILTIN_REWARDS)}"
        yield self.fault("name", f"no such reward; {hint}, or file.py:function, or package.module:function")


def shadowed_column_faults(columns: Mapping[str, str], functions: Sequence[RewardFunction]) -> Iterator[Fault]:
    """Names of `data.columns` that a custom reward function also has as options, which would hide the column.

    Options of built-in functions are not passed as columns.
    """
    for function in functions:
        options = {} if function.builtin else function.options
        for name in sorted(options.keys() & columns.keys()):
            text = f"is an option of the reward function {function.name} too; rename one of the two"
            yield Fault((name,), columns[name], text)


class RewardConfig(Section):
    """The reward: a weighted sum of functions that run in worker processes with a time limit."""

    functions: list[RewardFunction] = Field(
        [],
        max_length=ITEMS,
        description="Reward functions; the total is their weighted sum. Required by RL objectives.",
    )
    workers: int = Field(1, ge=1, le=WORKERS, description="Number of worker processes that run the reward functions.")
    timeout_s: float = Field(
        10.0,
        gt=0,
        le=SECONDS,
        description="Time limit in seconds per call of a worker (a chunk of completions). After a timeout, completions "
        "are retried one by one, for at most 6 x timeout_s.",
    )
    memory_gib: float | None = Field(
        16.0,
        gt=0,
        le=2**20,
        description="Memory limit in GiB of a worker and its child processes; a worker above it is killed and its call "
        "fails. null: none. Requires /proc.",
    )
    max_failed_frac: float = Field(
        0.5, ge=0, le=1, description="Maximum fraction of failed scores per step; the run stops above it."
    )
