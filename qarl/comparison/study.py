"""A study: one configuration, named variants of it, and the metrics to compare. Imports no torch.

A study file is YAML with these keys:

title: ...
config: {...}                    shared configuration
profiles: {gpu: {...}}           other sizes, chosen with --profile
variants: {NAME: {...}, ...}     changes per member
columns: [...], curves: [...]    additional columns of the table and charts of the page
"""

import copy
import json
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from qarl.checks.check import check_inputs
from qarl.comparison.plan import MEMBERS, Member, check_overrides
from qarl.config.load import key_place, read_yaml, validate
from qarl.config.messages import Loc, capped, shown, validated
from qarl.config.overrides import apply_overrides, override_keys
from qarl.errors import UserError
from qarl.inputs.limits import ITEMS, NAME, SCORE, TEXT
from qarl.inputs.section import Fault, Field, Section

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")


class StudyColumn(Section):
    """One number per member, computed from one metric over its steps, or whether it meets a bound."""

    head: str = Field(min_length=1, max_length=NAME, description="Header of the column.")
    metric: str = Field(min_length=1, max_length=NAME, description="A metric's name in metrics.jsonl.")
    over: Literal["mean", "first", "last", "max", "min", "first_quarter", "last_quarter"] = Field(
        "mean", description="Which steps, and how they are combined; the quarters are means."
    )
    at_least: float | None = Field(
        None, ge=-SCORE, le=SCORE, description="Show yes if the number is at least this, else no."
    )
    at_most: float | None = Field(
        None, ge=-SCORE, le=SCORE, description="Show yes if the number is at most this, else no."
    )
    help: str = Field("", max_length=TEXT, description="Short explanation.")

    def value(self, records: Sequence[dict[str, Any]]) -> float | None:
        """Return the number for a run's metrics; None if no step has the metric.

        Steps without it are skipped, because costly diagnostics are measured every few steps.
        """
        found = [value for record in records if (value := record.get(self.metric)) is not None]
        if not found:
            return None
        quarter = max(1, len(found) // 4)
        part = {"first_quarter": found[:quarter], "last_quarter": found[-quarter:]}.get(self.over, found)
        match self.over:
            case "first":
                return part[0]
            case "last":
                return part[-1]
            case "max":
                return max(part)
            case "min":
                return min(part)
        return statistics.fmean(part)

    def passes(self, value: float) -> bool | None:
        """Whether the value meets the bound; None without a bound."""
        if self.at_least is None and self.at_most is None:
            return None
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


class StudyCurve(Section):
    """One chart of a metric over the steps, with one curve per member."""

    metric: str = Field(min_length=1, max_length=NAME, description="A metric's name in metrics.jsonl.")
    title: str = Field(min_length=1, max_length=NAME, description="The chart's title.")
    unit: str = Field("as logged", max_length=NAME, description="Label of the y axis, with unit.")
    log_y: bool = Field(False, description="A logarithmic y axis.")


class Study(Section):
    """A study file."""

    title: str = Field(min_length=1, max_length=NAME, description="Title of the page.")
    config: dict[str, Any] = Field(description="The configuration that the variants change.")
    profiles: dict[str, dict[str, Any]] = Field(
        {}, max_length=ITEMS, description="Changes of size or device, chosen with --profile."
    )
    variants: dict[str, dict[str, Any] | None] = Field(
        min_length=1, max_length=ITEMS, description="Name -> changes of the member."
    )
    columns: list[StudyColumn] = Field([], max_length=ITEMS, description="Additional columns of the table.")
    curves: list[StudyCurve] = Field([], max_length=ITEMS, description="Additional charts of the page.")

    def faults(self) -> Iterator[Fault]:
        heads = [column.head for column in self.columns]
        for index, head in enumerate(heads):
            if head in heads[:index]:
                yield Fault(("columns", index, "head"), head, "is already used by another column; choose another")


def is_study(file: str) -> bool:
    """Whether a YAML file is a study rather than one configuration."""
    data = read_yaml(file)
    return isinstance(data, dict) and "variants" in data


def load_study(file: str) -> Study:
    """Read a study file.

    Raises:
        UserError: It is invalid; one line per error.
    """
    data = read_yaml(file)
    study = validated(Study, data, lambda loc: file)
    for name in (*study.variants, *study.profiles):
        if not _NAME.fullmatch(name):
            text = "becomes a directory name; use at most 100 letters, digits, . _ + and -"
            raise UserError(f"{file}: '{shown(name)}' {text}")
    return study


def plan_study(
    study: Study,
    file: str,
    overrides: list[str],
    out: Path,
    profile: str | None = None,
    only: list[str] | None = None,
    seeds: list[int] | None = None,
) -> list[Member]:
    """Return the members in the file's order, each variant with each seed. Writes nothing.

    A member's configuration is the study's, changed by the profile, then the variant, then the overrides. Members run
    in out/runs/NAME.

    Raises:
        UserError: An unknown profile or variant, an override of a key that a variant or an option sets, or an invalid
            configuration (each error, with the variant's name).
    """
    profile_changes = _chosen_profile(study, file, profile)
    names = _chosen(study, file, only)
    if (count := len(names) * len(seeds or [0])) > MEMBERS:
        raise UserError(f"{file}: {count:,} variants x seeds; the maximum is {MEMBERS:,}")
    members, faults = [], []
    options = {"train.run_dir": "--out"} | ({"train.seed": "--seeds"} if seeds else {})
    check_overrides(overrides, options)
    given = override_keys(overrides)
    for name in names:
        for key, option in options.items():
            if any(_sets(part, tuple(key.split("."))) for part in (study.variants[name] or {}, profile_changes)):
                raise UserError(f"{file}: variant {name}: {key}: {option} already sets it; remove it")
        taken = [key for key in given if _sets(study.variants[name] or {}, key)]
        if taken:
            key = ".".join(taken[0])
            raise UserError(f"command line: {key}: variant '{name}' already sets it; remove one of the two")
        for seed in seeds or (None,):
            member_name = name if seed is None or len(seeds or ()) == 1 else f"{name}-seed{seed}"
            member = Member(member_name, "", "", 0, out / "runs" / member_name, group=name)
            changes = [
                *overrides,
                *([] if seed is None else [f"train.seed={seed}"]),
                f"train.run_dir={json.dumps(str(member.run_dir))}",
            ]
            data = _merged(study.config, profile_changes, study.variants[name] or {})
            apply_overrides(data, changes)
            place = f"{file}: variant {name}"

            def where(loc: Loc, place: str = place) -> str:
                return key_place(loc, place, given)

            try:
                member.config = validate(data, where)
                check_inputs(member.config, place, overrides)
            except UserError as error:
                faults += [line for line in str(error).splitlines() if line not in faults]
                continue
            quant = member.config.quant
            member.scheme, member.learner, member.seed = quant.scheme, quant.learner, member.config.train.seed
            members.append(member)
    if faults:
        raise UserError("\n".join(capped(faults, file)))
    return members


def _chosen_profile(study: Study, file: str, profile: str | None) -> dict[str, Any]:
    if profile is None:
        return {}
    if profile not in study.profiles:
        known = shown(", ".join(study.profiles), 200) or "none"
        raise UserError(f"--profile: '{shown(profile)}' is not in {file}; it has {known}")
    return study.profiles[profile]


def _chosen(study: Study, file: str, only: list[str] | None) -> list[str]:
    for name in only or ():
        if name not in study.variants:
            known = shown(", ".join(study.variants), 200)
            raise UserError(f"--only: '{shown(name)}' is not a variant of {file}; choose from {known}")
    return [name for name in study.variants if only is None or name in only]


def _merged(*parts: dict[str, Any]) -> dict[str, Any]:
    """Merge nested mappings; later ones take precedence. Lists and values are replaced as a whole."""
    result: dict[str, Any] = {}
    for part in parts:
        _merge_into(result, copy.deepcopy(part))
    return result


def _merge_into(base: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge_into(base[key], value)
        else:
            base[key] = value


def _sets(changes: dict[str, Any], path: tuple[str, ...]) -> bool:
    """Return whether the nested `changes` set the key at `path`, or one above or below it."""
    here: Any = changes
    for step in path:
        if not isinstance(here, dict):
            return True
        if step not in here:
            return False
        here = here[step]
    return True
