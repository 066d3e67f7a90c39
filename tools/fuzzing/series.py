"""The series of cases of a seed. Case `run-7` of a seed does not depend on the number of cases."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from fuzzing.case import Case, Command, execute
from fuzzing.configs import mutate_config, mutate_nothing
from fuzzing.stored import mutate_model, mutate_run
from fuzzing.verdict import Result, Verdict, judge
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

# Relative frequency and mutator. A case that only reads a file takes 1 % of the time of one that runs a model.
MUTATORS: dict[str, tuple[int, Callable[[DrawFn, Path, Case], None]]] = {
    "config": (40, mutate_config),
    "run": (12, mutate_run),
    "model": (12, mutate_model),
    "valid": (0, mutate_nothing),
}


def names(seed: str, count: int) -> Iterator[str]:
    """Yield the names of the first `count` cases."""
    drawn, numbers = random.Random(f"{seed}:kinds"), Counter[str]()
    for _ in range(count):
        [kind] = drawn.choices(list(MUTATORS), [weight for weight, _ in MUTATORS.values()])
        yield f"{kind}-{numbers[kind]}"
        numbers[kind] += 1


def with_draws(seed: str, name: str, build: Callable[[DrawFn], None]) -> None:
    """Call `build` with Hypothesis' `draw`, whose values depend only on the seed and the name.

    Hypothesis' own generation (`max_examples`) derives each example from the ones before, so a case would change with
    the number of cases. Its fuzzer interface makes an example from a string of bytes instead. If Hypothesis rejects an
    example (a filter fails, or it is too large), `build` is called again with other bytes.
    """

    @settings(database=None)
    @given(st.data())
    def once(data: st.DataObject) -> None:
        build(data.draw)

    stream = random.Random(f"{seed}:{name}")
    while once.hypothesis.fuzz_one_input(stream.randbytes(2**15)) is None:
        pass


def build(seed: str, name: str, base: Path, directory: Path) -> Case:
    """Create a case in `directory`."""
    case = Case(name, directory)

    def lay_out_case(draw: DrawFn) -> None:
        nonlocal case
        case.remove()
        case = Case(name, directory)
        case.cwd.mkdir(parents=True)
        MUTATORS[case.kind][1](draw, base, case)

    with_draws(seed, name, lay_out_case)
    return case


def run_case(seed: str, name: str, base: Path, root: Path, command: Command, keep: bool = False) -> Result:
    """Build, run and judge one case. keep: Do not remove its directory.

    A case of kind "valid" that `check` accepts is trained. It is bad if `train` then refuses it.
    """
    case = build(seed, name, base, root / f"{seed}-{name}")
    outcome = execute(case, command)
    verdict = judge(case, outcome)
    if case.kind == "valid" and verdict.status == "accepted":
        case.argv = ["train", "c.yaml"]
        outcome = execute(case, command)
        verdict = judge(case, outcome)
        if verdict.status == "refused":
            last = outcome.err.decode(errors="replace").splitlines()[-1]
            verdict = Verdict("bad", "untrainable", last)
    if not keep:
        case.remove()
    return Result(case, outcome, verdict)
