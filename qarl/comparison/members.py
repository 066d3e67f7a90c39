"""Metrics of one run, and aggregated over the seeds of one scheme and learner. Imports no torch."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from qarl.checks.check import check_model
from qarl.comparison.intervals import mean_interval
from qarl.comparison.plan import Member
from qarl.comparison.study import StudyColumn
from qarl.config import Config
from qarl.config.architecture import Architecture
from qarl.errors import UserError
from qarl.memory.tensors import version_bytes
from qarl.storage.runs import RunRecord

COLUMN = "column:"  # prefix of a study's columns in the keys of comparison.json
INTERVAL_SEEDS = 3  # with fewer, a group's low and high are the minimum and maximum


def numbers_of(record: RunRecord) -> dict[str, Any]:
    """Return the entries of comparison.json for a run; None for missing numbers.

    Returns:
        `steps`: number of recorded steps. `reward_*`: means of `reward/mean` over the first and the last quarter of the
        steps. `mismatch_*`: mean of the steps' means, maximum of their maxima. `*_s` (seconds) and `*_tokens_per_s`:
        medians over all steps after the first, which includes warm-up. `checkpoint_bytes`: size of the low-bit export,
        computed. `evaluation`: the last one.
    """
    records = record.metrics
    quarter = max(1, len(records) // 4)
    timed = records[1:] or records
    return {
        "steps": record.step,
        "reward_first_quarter": _mean(r.get("reward/mean") for r in records[:quarter]),
        "reward_last_quarter": _mean(r.get("reward/mean") for r in records[-quarter:]),
        "evaluation": record.evaluations[-1] if record.evaluations else None,
        "mismatch_delta_abs_mean": _mean(r.get("mismatch/delta_abs_mean") for r in records),
        "mismatch_delta_abs_max": _max(records, "mismatch/delta_abs_max"),
        "checkpoint_bytes": checkpoint_bytes(record.config),
        "memory_peak_gib": _max(records, "memory/peak_gib"),
        **{f"{name}_s": _median(timed, f"time/{name}_s") for name in ("step", "rollout", "learner", "publish")},
        **{
            f"{name}_tokens_per_s": _median(timed, f"throughput/{name}_tokens_per_s") for name in ("rollout", "learner")
        },
    }


def architecture_of(config: Config) -> Architecture | None:
    """Return the model's shape; None if it is unknown or the model moved. The run's own metrics do not need it."""
    try:
        return check_model(config.model).architecture
    except UserError:
        return None


def checkpoint_bytes(config: Config) -> int | None:
    """Return the bytes of the tensors that `qarl export` writes for a run; None if the model's shape is unknown."""
    architecture = architecture_of(config)
    return None if architecture is None else version_bytes(config, architecture, exported=True)


def evaluation_avg(entry: dict[str, Any]) -> dict[str, float] | None:
    """Return mean, low and high of a member's overall avg@k; None without an evaluation."""
    evaluation = entry.get("evaluation") or {}
    return (evaluation.get("overall") or {}).get("avg")


GROUPED = (
    "reward_first_quarter",
    "reward_last_quarter",
    "mismatch_delta_abs_mean",
    "mismatch_delta_abs_max",
    "memory_peak_gib",
    "step_s",
    "rollout_s",
    "learner_s",
    "publish_s",
    "rollout_tokens_per_s",
    "learner_tokens_per_s",
)


def grouped(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Aggregate members that differ only in their seed: mean, low and high of each number over the seeds.

    Args:
        entries: Members as in comparison.json. Unfinished ones are left out.

    Returns:
        One entry per group; empty if no group has a second seed. The bounds are a 95 % t-interval for at least three
        seeds (`interval`: t95), otherwise minimum and maximum (`min-max`).
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        if entry["state"] == "finished":
            groups.setdefault(entry["group"], []).append(entry)
    if all(len(group) < 2 for group in groups.values()):
        return []
    return [_group(name, group) for name, group in groups.items()]


def _group(name: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
    own = [key for key in entries[0] if key.startswith(COLUMN)]
    columns = {key: [entry.get(key) for entry in entries] for key in (*GROUPED, *own)}
    columns["evaluation_avg"] = [(evaluation_avg(entry) or {}).get("mean") for entry in entries]
    return {
        "name": name,
        "scheme": entries[0]["scheme"],
        "learner": entries[0]["learner"],
        "seeds": [entry["seed"] for entry in entries],
        "interval": "t95" if len(entries) >= INTERVAL_SEEDS else "min-max",
        **{key: _bounds([v for v in values if v is not None], len(entries)) for key, values in columns.items()},
        "checkpoint_bytes": entries[0]["checkpoint_bytes"],
    }


def _bounds(values: list[float], seeds: int) -> dict[str, float | None] | None:
    """None if a seed lacks the number, because a mean over the others would not represent the group."""
    if len(values) < seeds:
        return None
    if seeds < INTERVAL_SEEDS:
        return {"mean": statistics.fmean(values), "low": min(values), "high": max(values)}
    mean, low, high = mean_interval(values)
    return {"mean": mean, "low": low, "high": high}


def entry_of(member: Member, record: RunRecord | None, columns: Sequence[StudyColumn] = ()) -> dict[str, Any]:
    """Return the member's object in comparison.json.

    Args:
        member: The member.
        record: Its run; None if there is no run directory.
        columns: Additional columns of a study.
    """
    objective = member.config.objective.name if member.config else None
    return {
        "name": member.name,
        "group": member.group,
        "state": member.state,
        "reason": member.reason,
        "reused": member.reused,
        "scheme": member.scheme,
        "learner": member.learner,
        "seed": member.seed,
        "objective": objective,
        "run_dir": str(member.run_dir) if record else None,
        **(numbers_of(record) if record and record.metrics else {}),
        **{f"{COLUMN}{c.head}": c.value(record.metrics) if record else None for c in columns},
    }


def _mean(values: Iterable[float | None]) -> float | None:
    """None if a step has no finite value, because the mean of the others would hide that."""
    every = list(values)
    known = [value for value in every if value is not None]
    return statistics.fmean(known) if known and len(known) == len(every) else None


def _max(records: list[dict[str, Any]], name: str) -> float | None:
    """None under the same conditions as `_mean`."""
    values = [record.get(name) for record in records]
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


def _median(records: list[dict[str, Any]], name: str) -> float | None:
    values = [record[name] for record in records if record.get(name) is not None]
    return statistics.median(values) if values else None
