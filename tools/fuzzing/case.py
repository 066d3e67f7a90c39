"""One case: a command line, the directory it runs in, and what is known about it beforehand."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

# Wall seconds a command may take on two busy cores. What only reads files has no business taking long.
READING_S, WORKING_S = 10.0, 60.0
READING = ("check", "schema", "runs")
GIB = 2**30


@dataclass
class Case:
    """One case.

    Attributes:
        name: Kind, and number in the seed's series of that kind.
        directory: The directory of the case.
        mutation: The mutation, in one line.
        argv: Arguments of `qarl`.
        must_refuse: The mutation must be refused: exit code 0 is wrong.
        examine: Returns what is wrong with the directory afterwards, in a few words, or None.
        second_rank: Working directory of a second rank that runs the same command; None for one process.
    """

    name: str
    directory: Path
    mutation: str = ""
    argv: list[str] = field(default_factory=list)
    must_refuse: bool = False
    examine: Callable[[Path], str | None] | None = None
    second_rank: Path | None = None

    @property
    def kind(self) -> str:
        """What was mutated."""
        return self.name.rpartition("-")[0]

    @property
    def command(self) -> str:
        return self.argv[0] if self.argv else "-"

    @property
    def reads_only(self) -> bool:
        """Whether it runs no model."""
        return self.command in READING

    @property
    def cwd(self) -> Path:
        """Three levels below the case's directory, so that `..` stays inside it."""
        return self.directory / "a" / "b" / "work"

    @property
    def limit_s(self) -> float:
        return READING_S if self.reads_only else WORKING_S

    @property
    def memory_limit(self) -> int:
        """Bytes that it may hold beyond those it starts with."""
        return (1 if self.reads_only else 2) * GIB


def with_draws(seed: str, name: str, build: Callable[[DrawFn], None]) -> None:
    """Call `build` with Hypothesis' `draw`, whose values depend on the seed and the name alone.

    Hypothesis' own generation (`max_examples`) derives each example from the ones before, so a case would change with
    the number of cases. Its interface for fuzzers makes an example of a string of bytes instead. `build` is called
    again, with other bytes, if Hypothesis rejects an example (a filter, or one that is too large).
    """

    @settings(database=None)
    @given(st.data())
    def once(data: st.DataObject) -> None:
        build(data.draw)

    stream = random.Random(f"{seed}:{name}")
    while once.hypothesis.fuzz_one_input(stream.randbytes(2**15)) is None:
        pass
