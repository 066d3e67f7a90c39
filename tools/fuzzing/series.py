"""The series of cases of a seed: case `run-7` of a seed is the same whatever the count, the kinds and the jobs."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fuzzing.base import Base
from fuzzing.case import Case, case_random
from fuzzing.configs import mutate_config, mutate_override
from fuzzing.datasets import mutate_dataset
from fuzzing.execute import Outcome, execute
from fuzzing.models import mutate_model
from fuzzing.options import mutate_options
from fuzzing.ranks import mutate_ranks
from fuzzing.rewards import mutate_reward
from fuzzing.rundirs import mutate_run
from fuzzing.verdict import Verdict, judge

Mutator = Callable[[random.Random, Base, Case], None]

MUTATORS: dict[str, Mutator] = {
    "config": mutate_config,
    "override": mutate_override,
    "option": mutate_options,
    "data": mutate_dataset,
    "run": mutate_run,
    "model": mutate_model,
    "reward": mutate_reward,
    "ranks": mutate_ranks,
}
# Relative frequencies. Cases that only read a file take a hundredth of the time of those that run a model.
WEIGHTS = {"config": 40, "override": 15, "option": 12, "data": 9, "run": 12, "model": 9, "reward": 3, "ranks": 2}


@dataclass(frozen=True)
class Result:
    case: Case
    outcome: Outcome
    verdict: Verdict


def names(seed: str, count: int, kinds: Collection[str]) -> Iterator[str]:
    """The first `count` cases that are of `kinds`."""
    drawn = random.Random(f"{seed}:kinds")
    numbers = Counter[str]()
    while count:
        kind = drawn.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if kind in kinds:
            yield f"{kind}-{numbers[kind]}"
            numbers[kind] += 1
            count -= 1


def build(seed: str, name: str, base: Base, directory: Path) -> Case:
    """Lay out a case in `directory`, which is made."""
    case = Case(name, directory)
    case.cwd.mkdir(parents=True)
    MUTATORS[case.kind](case_random(seed, name), base, case)
    return case


def run_case(
    seed: str, name: str, base: Base, root: Path, command: Callable[[Sequence[str]], object], keep: bool = False
) -> Result:
    """Build, run and judge one case. keep: leave its directory."""
    directory = root / f"{seed}-{name}"
    remove(directory)
    case = build(seed, name, base, directory)
    outcome = execute(case, command)
    verdict = judge(case, outcome)
    if not keep:
        remove(directory)
    return Result(case, outcome, verdict)


def remove(directory: Path) -> None:
    """Remove a case's directory, whatever the command left in it."""
    shutil.rmtree(directory, onerror=_loosen)


def _loosen(function: Callable[[str], object], path: str, raised: tuple) -> None:
    error = raised[1]
    if isinstance(error, PermissionError):
        os.chmod(Path(path).parent, 0o700)
        os.chmod(path, 0o700)
        function(path)
    elif not isinstance(error, FileNotFoundError):
        raise error
