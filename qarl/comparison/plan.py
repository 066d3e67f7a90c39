"""The runs of a comparison: schemes x learners x seeds on top of one configuration. Imports no torch.

A meaningless combination (bf16 with fake_quant: nothing to quantize) is skipped, and its row says so. A combination
with an invalid configuration is refused: its row gives the reason, and the others continue. If all are invalid, the
command ends before it writes anything.
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

from qarl_formats.registry import scheme_class, scheme_names
from qarl_formats.scheme import GRIDS

from qarl.checks.check import check_inputs
from qarl.comparison.inputs import input_fault
from qarl.config import Config
from qarl.config.config import QuantConfig
from qarl.config.load import make_config, read_yaml
from qarl.config.messages import capped, shown
from qarl.config.overrides import apply_overrides, override_keys
from qarl.errors import UserError
from qarl.storage.config_difference import config_difference
from qarl.storage.runs import RunRecord, read_run
from qarl.utils.text import first_few

MEMBERS = 1000  # maximum per comparison
UNQUANTIZED = "bf16"
LEARNERS: tuple[str, ...] = get_args(QuantConfig.model_fields["learner"].annotation)

# waiting: not started. finished, stopped, running, empty: states of a run. failed: training ended with an error.
# refused: invalid configuration. skipped: meaningless combination.
State = Literal["waiting", "running", "finished", "stopped", "empty", "failed", "refused", "skipped"]


@dataclass
class Member:
    """One run of a comparison, and its state.

    Attributes:
        config: Resolved configuration; None if it was invalid.
        reason: One line that explains the state, if needed.
        reused: Whether it was finished before this comparison.
        group: Common name of members that differ only in their seed.
    """

    name: str
    scheme: str
    learner: str
    seed: int
    run_dir: Path
    config: Config | None = None
    state: State = "waiting"
    reason: str | None = None
    reused: bool = False
    group: str = ""

    def __post_init__(self) -> None:
        self.group = self.group or f"{self.scheme}-{self.learner}"


@dataclass(frozen=True)
class Axes:
    """The axes of a comparison; None: the configuration's value."""

    schemes: list[str] | None = None
    learners: list[str] | None = None
    seeds: list[int] | None = None


def parse_axes(schemes: str | None, learners: str | None, seeds: str | None) -> Axes:
    """Parse --schemes, --learners and --seeds.

    Raises:
        UserError: A value is unknown or duplicate, or all options are missing.
    """
    if schemes is None and learners is None and seeds is None:
        raise UserError("compare: nothing to vary; give --schemes, --learners or --seeds, or several run directories")
    return Axes(
        None if schemes is None else parse_names("--schemes", schemes, scheme_names()),
        None if learners is None else parse_names("--learners", learners, LEARNERS),
        None if seeds is None else parse_seeds(seeds),
    )


def parse_names(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Parse a comma-separated list of names from `known`, each at most once. Raises UserError."""
    names = split_list(option, text, known[0])
    for name in names:
        if name not in known:
            raise UserError(f"{option}: '{shown(name)}' is unknown; choose from {', '.join(known)}")
    return names


def plan(file: str, overrides: list[str], axes: Axes, out: Path, data: Any = None) -> list[Member]:
    """Return the members of a comparison, in the order schemes, learners, seeds. Writes nothing.

    Every configuration is validated as by `qarl train`.

    Args:
        file, overrides: As for `qarl train`.
        axes: What varies.
        out: The comparison's directory; members run in out/runs/NAME.
        data: Parsed configuration, if `file` is only a name for messages.

    Raises:
        UserError: An override sets train.run_dir or a key that an option varies, or all members are invalid (one line
            per distinct reason).
    """
    check_overrides(overrides, _taken(axes))
    data = read_yaml(file) if data is None else data
    own = copy.deepcopy(data)
    if isinstance(own, dict):
        apply_overrides(own, overrides)
    quant, train = (_section(own, name) for name in ("quant", "train"))
    schemes = axes.schemes or [quant.get("scheme", QuantConfig.model_fields["scheme"].default)]
    learners = axes.learners or [quant.get("learner", "aligned")]
    seeds = axes.seeds or [train.get("seed", 0)]
    if (count := len(schemes) * len(learners) * len(seeds)) > MEMBERS:
        raise UserError(f"compare: {count:,} schemes x learners x seeds; the maximum is {MEMBERS:,}")
    members, checked, faults = [], 0, []
    for scheme, learner, seed in product(schemes, learners, seeds):
        name = f"{scheme}-{learner}-seed{seed}"
        member = Member(name, scheme, learner, seed, out / "runs" / name)
        members.append(member)
        if scheme == UNQUANTIZED and learner == "fake_quant":
            member.state = "skipped"
            member.reason = f"scheme {scheme} has nothing to quantize, so there is no fake_quant learner"
            continue
        changes = [
            *overrides,
            *([f"quant.scheme={scheme}"] if axes.schemes else []),
            *([f"quant.learner={learner}"] if axes.learners else []),
            *_dropped(quant, scheme, learner),
            *([f"train.seed={seed}"] if axes.seeds else []),
            f"train.run_dir={json.dumps(str(member.run_dir))}",
        ]
        checked += 1
        try:
            member.config = make_config(copy.deepcopy(data), file, changes)
            check_inputs(member.config, file, changes)
        except UserError as error:
            member.state, member.reason, member.config = "refused", "; ".join(str(error).splitlines()), None
            faults += [line for line in str(error).splitlines() if line not in faults]
    if not checked:
        raise UserError(f"compare: scheme {UNQUANTIZED} has nothing to quantize; add another scheme or another learner")
    if all(member.config is None for member in members):
        raise UserError("\n".join(capped(faults, file)))
    return members


def find_finished(members: list[Member], records: list[RunRecord]) -> list[str]:
    """Mark the members that need no training, in place.

    These have a finished run of the same configuration and inputs in their own directory, or else among `records`.

    Args:
        members: Members of the comparison.
        records: Runs to reuse (`--reuse`).

    Returns:
        One line for each run of `records` that is not reused because its inputs differ.

    Raises:
        UserError: The directory of a member holds a run of another configuration, of other inputs, or with more steps
            than configured.
    """
    lines: list[str] = []
    for member in members:
        if member.config is None:
            continue
        record = _own_run(member)
        if record is None:
            candidates = [other for other in records if _same(other, member.config)]
            record = _with_same_inputs(member, candidates, lines)
        if record is not None:
            member.state, member.reused, member.run_dir = "finished", True, record.path
    return lines


def _own_run(member: Member) -> RunRecord | None:
    """Return the complete run in the member's own directory, if there is one."""
    assert member.config is not None
    if not (member.run_dir / "config.yaml").exists():
        return None
    own = read_run(member.run_dir)
    if not own.metrics:
        return None
    _check_same(own, member)
    return own if is_complete(own, member.config) else None


def _with_same_inputs(member: Member, candidates: list[RunRecord], lines: list[str]) -> RunRecord | None:
    """Return the first candidate with the member's inputs. Appends the reasons against others to `lines`."""
    assert member.config is not None
    for record in candidates:
        fault = input_fault(record, member.config)
        if fault is None:
            return record
        lines.append(f"{member.name}: {record.path} is not reused: {fault.reason}")
    return None


def is_complete(record: RunRecord, config: Config) -> bool:
    """Return whether a run has all steps of `config`, and the evaluation after the last one if it is due."""
    steps = config.train.steps
    evaluated = not config.evaluation.due(steps, steps) or any(row["step"] == steps for row in record.evaluations)
    return record.state == "finished" and record.step == steps and evaluated


def _same(record: RunRecord, config: Config) -> bool:
    return is_complete(record, config) and not _difference(record, config)


def _difference(record: RunRecord, config: Config) -> list[str]:
    """Return one line per difference that rules out a run: keys of `config_difference`, number of steps, first step.

    A constant learning rate does not depend on the number of steps, so these may differ.
    """
    lines = config_difference(record.config.model_dump(mode="json"), config.model_dump(mode="json"))
    there, here, schedule = record.config.train.steps, config.train.steps, config.optim.schedule
    if there != here and schedule != "constant":
        lines.append(f"train.steps is {there} there, {here} here, and optim.schedule {schedule} depends on it")
    first, resume = record.metrics[0]["step"], config.checkpoint.resume
    if record.state == "finished" and (first == 1) != (resume in ("auto", "never")):
        lines.append(f"its first step is {first} there, checkpoint.resume is {resume} here")
    return lines


def _check_same(own: RunRecord, member: Member) -> None:
    assert member.config is not None
    difference = _difference(own, member.config)
    if difference:
        raise UserError(
            f"{own.path}: holds a run of another configuration ({first_few(difference, separator='; ')}); "
            "choose another --out, or restore these values"
        )
    if own.step > member.config.train.steps:
        raise UserError(
            f"{own.path}: holds {own.step} steps, more than train.steps = {member.config.train.steps}; "
            "choose another --out, or raise train.steps"
        )
    if fault := input_fault(own, member.config):
        raise UserError(f"{own.path}: {fault.reason}; {fault.fix}, or choose another --out")


def _taken(axes: Axes) -> dict[str, str]:
    """Return key -> option for the keys that options set."""
    taken = {"train.run_dir": "--out"}
    taken |= {"quant.scheme": "--schemes"} if axes.schemes else {}
    taken |= {"quant.learner": "--learners"} if axes.learners else {}
    taken |= {"train.seed": "--seeds"} if axes.seeds else {}
    return taken


def check_overrides(overrides: list[str], taken: dict[str, str]) -> None:
    """Raise UserError for an override of a key that an option sets. taken: key -> option."""
    for key in sorted(".".join(path) for path in override_keys(overrides)):
        if key in taken:
            raise UserError(f"command line: {key}: {taken[key]} already sets it; remove one of the two")


def _dropped(quant: dict[str, Any], scheme: str, learner: str) -> list[str]:
    """Return overrides that reset keys of the configuration which do not apply to `scheme`."""
    kind = scheme_class(scheme)
    changes = []
    if quant.get("group_size") is not None and not kind.group_sizes:
        changes.append("quant.group_size=null")
    symmetric = quant.get("symmetric", True) or not kind.zero_points
    if quant.get("symmetric") is False and symmetric:
        changes.append("quant.symmetric=true")
    if quant.get("grid", GRIDS[0]) not in (GRIDS[0], *(kind.grids if symmetric else ())):
        changes.append(f"quant.grid={GRIDS[0]}")
    quantizes_input = kind.activation is not None and learner != "full_precision"
    if quant.get("ste_input") == "dequantized" and not quantizes_input:
        changes.append("quant.ste_input=unquantized")
    return changes


def _section(data: Any, name: str) -> dict[str, Any]:
    section = data.get(name) if isinstance(data, dict) else None
    return section if isinstance(section, dict) else {}


def parse_seeds(text: str) -> list[int]:
    """Parse --seeds; each seed at most once. Raises UserError."""
    seeds = split_list("--seeds", text, "0,1,2")
    for seed in seeds:
        if not (seed.isascii() and seed.isdecimal() and len(seed) <= 10 and int(seed) < 2**31):
            valid = f"give whole numbers from 0 to {2**31 - 1}, such as 0,1,2"
            raise UserError(f"--seeds: '{shown(seed)}' is not a valid seed; {valid}")
    numbers = [int(seed) for seed in seeds]
    _check_unique("--seeds", numbers)
    return numbers


def split_list(option: str, text: str, example: str) -> list[str]:
    """Split a comma-separated list; each entry at most once. Raises UserError, with `example` in the message."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise UserError(f"{option}: '{shown(text)}' has an empty entry; give a list such as {example}")
    if len(parts) > MEMBERS:
        raise UserError(f"{option}: has {len(parts):,} entries; the maximum is {MEMBERS:,}")
    _check_unique(option, parts)
    return parts


def _check_unique(option: str, values: Sequence[object]) -> None:
    for index, value in enumerate(values):
        if value in values[:index]:
            raise UserError(f"{option}: {shown(str(value))} is given twice; leave one out")
