"""Summarize scored completions for `results.json` and `evaluations.jsonl`. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from qarl.evaluation.estimators import Estimate, task_avg, task_pass_at_k, unweighted_mean
from qarl.inputs.schema import Count, Record
from qarl.utils.averages import mean

Row = dict[str, Any]


class CompletionRow(Record):
    """The entries of a completions.jsonl line that `summarise` and a resumed evaluation read."""

    task: str
    prompt_id: Count
    sample: Count
    prompt: str
    finish_reason: str
    tokens: Count
    reward: float
    correct: bool


def summarise(tasks: Sequence[str], rows: Iterable[Row], samples: int, pass_at: Sequence[int]) -> dict[str, Any]:
    """Compute avg and pass@k per task and overall.

    Args:
        tasks: Names of the tasks, in order.
        rows: Completions, `samples` per prompt.
        samples: Completions per prompt.
        pass_at: Values of k.

    Returns:
        {"tasks": [...], "overall": {...}}, each value with its 95 % interval as {"mean", "low", "high"}. `overall` is
        the unweighted mean over tasks.
    """
    by_task: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_task[row["task"]].append(row)
    entries, averages, passes = [], [], []
    for name in tasks:
        own = by_task[name]
        correct: dict[int, int] = defaultdict(int)
        for row in own:
            correct[row["prompt_id"]] += row["correct"]
        assert len(own) == samples * len(correct), f"{name}: {len(own)} completions of {len(correct)} prompts"
        counts = list(correct.values())
        averages.append(task_avg(counts, samples))
        passes.append({k: task_pass_at_k(counts, samples, k) for k in pass_at})
        entries.append(
            {
                "name": name,
                "prompts": len(counts),
                "samples": samples,
                **_values(averages[-1], passes[-1]),
                "reward_mean": mean(row["reward"] for row in own),
                "truncated_frac": sum(row["finish_reason"] == "length" for row in own) / len(own),
                "length_mean": mean(row["tokens"] for row in own),
            }
        )
    overall = _values(unweighted_mean(averages), {k: unweighted_mean([p[k] for p in passes]) for k in pass_at})
    return {"tasks": entries, "overall": overall}


def metrics_of(summary: dict[str, Any]) -> dict[str, float]:
    """Convert a summary to tracker metrics: eval/<task>/avg, eval/<task>/pass@k, ..., eval/avg, eval/pass@k."""
    metrics: dict[str, float] = {}
    for entry in summary["tasks"]:
        name = f"eval/{entry['name']}"
        metrics |= _means(name, entry)
        metrics |= {f"{name}/{key}": entry[key] for key in ("reward_mean", "truncated_frac", "length_mean")}
    metrics |= {f"eval/held_out/{name}": value for name, value in summary.get("held_out", {}).items()}
    return metrics | (_means("eval", summary["overall"]) if "overall" in summary else {})


def _values(avg: Estimate, passes: dict[int, Estimate]) -> dict[str, Any]:
    return {"avg": avg._asdict(), "pass": {str(k): estimate._asdict() for k, estimate in passes.items()}}


def _means(prefix: str, values: dict[str, Any]) -> dict[str, float]:
    passes = {f"{prefix}/pass@{k}": estimate["mean"] for k, estimate in values["pass"].items()}
    return {f"{prefix}/avg": values["avg"]["mean"], **passes}
