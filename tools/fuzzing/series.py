"""The series of cases of a seed: case `run-7` of a seed is the same whatever the count and the kinds."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import yaml
from fuzzing.base import Base, lay_out
from fuzzing.case import Case, execute, with_draws
from fuzzing.configs import mutate_config, mutate_override, valid_config
from fuzzing.datasets import mutate_dataset
from fuzzing.options import mutate_options
from fuzzing.rewards import mutate_reward
from fuzzing.stored import mutate_model, mutate_ranks, mutate_run
from fuzzing.values import shown
from fuzzing.verdict import Result, Verdict, judge
from hypothesis.strategies import DrawFn

Command = Callable[[Sequence[str]], object]


def mutate_nothing(draw: DrawFn, base: Base, case: Case) -> None:
    """`qarl check` of a configuration that is within the schema's ranges."""
    what, data = valid_config(draw, base)
    case.mutation = f"valid: {shown(what, 300)}"
    (case.cwd / "c.yaml").write_text(yaml.safe_dump(data))
    lay_out(base, case, "objective")
    case.argv = ["check", "c.yaml"]


# Relative frequencies. Cases that only read a file take a hundredth of the time of those that run a model.
MUTATORS: dict[str, tuple[int, Callable[[DrawFn, Base, Case], None]]] = {
    "config": (40, mutate_config),
    "override": (15, mutate_override),
    "option": (12, mutate_options),
    "data": (9, mutate_dataset),
    "run": (12, mutate_run),
    "model": (9, mutate_model),
    "reward": (3, mutate_reward),
    "ranks": (2, mutate_ranks),
    "valid": (0, mutate_nothing),
}
KINDS = tuple(kind for kind, (weight, _) in MUTATORS.items() if weight)


def names(seed: str, count: int, kinds: Collection[str]) -> Iterator[str]:
    """The first `count` cases that are of `kinds`."""
    drawn = random.Random(f"{seed}:kinds")
    numbers = Counter[str]()
    while count:
        kind = drawn.choices(list(MUTATORS), [weight for weight, _ in MUTATORS.values()])[0]
        if kind in kinds:
            yield f"{kind}-{numbers[kind]}"
            numbers[kind] += 1
            count -= 1


def build(seed: str, name: str, base: Base, directory: Path) -> Case:
    """Lay out a case in `directory`, which is made."""
    case = Case(name, directory)

    def lay_out_case(draw: DrawFn) -> None:
        nonlocal case
        remove(directory)
        case = Case(name, directory)
        case.cwd.mkdir(parents=True)
        MUTATORS[case.kind][1](draw, base, case)

    with_draws(seed, name, lay_out_case)
    return case


def run_case(seed: str, name: str, base: Base, root: Path, command: Command, keep: bool = False) -> Result:
    """Build, run and judge one case. keep: leave its directory.

    What `check` accepts of kind "valid" is trained. Refused by `train` after that is bad.
    """
    directory = root / f"{seed}-{name}"
    case = build(seed, name, base, directory)
    outcome = execute(case, command)
    verdict = judge(case, outcome)
    if case.kind == "valid" and verdict.status == "accepted":
        case.argv = ["train", "c.yaml"]
        outcome = execute(case, command)
        verdict = judge(case, outcome)
        if verdict.status == "refused":
            last = outcome.err.decode(errors="replace").splitlines()[-1]
            verdict = Verdict("bad", "untrainable", f"train: {last[:100]}", last)
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
