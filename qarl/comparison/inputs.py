"""Checks whether runs with equal configurations also used the same files, rewards and evaluation settings."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from qarl.config import Config
from qarl.inputs.json import flatten
from qarl.storage.config_difference import config_difference
from qarl.storage.input_files import UNKNOWN, changed_names, present_inputs
from qarl.storage.runs import RunRecord
from qarl.utils.text import first_few

SHOWN = 4  # maximum number of names per line
_SCHEDULE = ("every", "before_training", "at_end")  # keys of `evaluation` that do not affect values


class Fault(NamedTuple):
    """Why a finished run cannot serve as a member, and the fix."""

    reason: str
    fix: str


def input_fault(record: RunRecord, config: Config) -> Fault | None:
    """Compare a run's inputs with the current ones.

    Args:
        record: A run of the same configuration.
        config: The configuration, whose files are read.

    Returns:
        None if all recorded inputs are unchanged.

    Raises:
        UserError: A file cannot be read.
    """
    recorded = recorded_inputs(record)
    used = recorded.get("changed")
    if isinstance(used, list) and used:
        return Fault(f"the run used several versions of {first_few(used, SHOWN)}", "train it again")
    if names := changed_names(recorded, present_inputs(config, list(recorded))):
        return Fault(f"{first_few(names, SHOWN)} changed since the run was trained", "restore that")
    evaluated = record.state == "finished" and record.evaluations
    if evaluated and (lines := config_difference(_evaluation(record.config), _evaluation(config))):
        return Fault(
            f"its evaluations have other settings ({first_few(lines, separator='; ')})", "restore these values"
        )
    return None


def unknown_inputs(record: RunRecord) -> str | None:
    """Return one line about inputs that a run did not record and that cannot be compared; None if there are none."""
    recorded = recorded_inputs(record)
    if not recorded:
        return "an older qarl recorded no inputs, so it is unknown whether they are the same"
    files = recorded.get("files")
    if not isinstance(files, dict):
        return "an older qarl recorded no digests of files, so it is unknown whether model and data are the same"
    unknown = [name for name, identity in files.items() if identity == UNKNOWN]
    return f"it is unknown whether {first_few(unknown, SHOWN)} is the same" if unknown else None


def recorded_inputs(record: RunRecord) -> dict[str, Any]:
    """Return `inputs` of a run's environment.json; empty if it has none."""
    inputs = record.environment.get("inputs")
    return inputs if isinstance(inputs, dict) else {}


def input_differences(records: Mapping[str, RunRecord]) -> dict[str, dict[str, Any]]:
    """Return inputs that differ between runs.

    The model is compared by the values that transformers resolved, and by its files only if a run recorded nothing
    else.

    Args:
        records: Member -> run.

    Returns:
        Input -> member -> value or digest, for the members that recorded one.
    """
    flat = {name: _comparable(recorded_inputs(record)) for name, record in records.items()}
    keys = dict.fromkeys(key for values in flat.values() for key in values)
    found: dict[str, dict[str, Any]] = {}
    for key in keys:
        known = {name: values[key] for name, values in flat.items() if key in values and values[key] != UNKNOWN}
        section = key.partition(": ")[0]
        having = [name for name, values in flat.items() if any(one.partition(": ")[0] == section for one in values)]
        silent = [name for name in having if name not in known]
        values = {**known, **dict.fromkeys(silent)}
        if len({str(value) for value in values.values()}) > 1:
            found[key] = values
    return found


def notices(records: Mapping[str, RunRecord], differences: Mapping[str, Any]) -> list[str]:
    """Return warnings about inputs and damaged records, shown above the numbers."""
    lines = []
    if differences:
        lines.append(
            f"the runs were made from different inputs: {first_few(differences, SHOWN)}; comparison.json has all of "
            "them (input_differences)"
        )
    unknown: dict[str, list[str]] = {}
    for name, record in records.items():
        if line := unknown_inputs(record):
            unknown.setdefault(line, []).append(name)
        if record.damaged and record.state != "running":  # a running one may be writing its last line
            files = first_few(record.damaged, SHOWN)
            lines.append(f"{name}: unreadable lines of {files} are left out of its numbers")
    return lines + [f"{first_few(names, SHOWN)}: {line}" for line, names in unknown.items()]


def _comparable(inputs: dict[str, Any]) -> dict[str, Any]:
    """`SECTION: PART` -> value. Files of the model are left out if their resolved values are recorded."""
    resolved = "config.json" in inputs
    flat: dict[str, Any] = {}
    for kind, parts in inputs.items():
        for part, value in flatten(parts).items() if isinstance(parts, dict) else ():
            if kind != "files":
                flat[f"{kind}: {part}"] = value
            elif not (resolved and part.startswith("model.path: ") and value != UNKNOWN):
                flat[part] = value
    return flat


def _evaluation(config: Config) -> Any:
    """The `evaluation` section without its schedule."""
    return config.evaluation.model_dump(mode="json", exclude=set(_SCHEDULE))
