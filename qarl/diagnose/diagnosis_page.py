"""The HTML page of a diagnosis: findings, plots and metrics. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qarl.diagnose.reading import Finding
from qarl.report.blocks import Block, Column, Section, Table, Text
from qarl.report.curves import meaning
from qarl.report.diagnostics import record_blocks, sampled
from qarl.report.formatting import number

if TYPE_CHECKING:
    from qarl.diagnose.measure import Diagnosis

GROUPS = {
    "mismatch": "Sampler and learner at the rollout's version",
    "history": "Over the run",
    "precision": "Precision, at the weights after the step",
    "policy": "Contributions C(r) = -(r - 1) A",
    "weights": "Correction weights",
    "gradients": "Gradient, without clipping",
    "deployed": "Served policy, before and after the step",
    "quant": "Published values that the step changed",
    "error_tokens": "Repetitive and garbled stretches",
}
THRESHOLDS = (
    "Thresholds come from the runs in the papers, or are ours if a paper gives none. They show where to look; they "
    "prove nothing."
)
# Metrics that no run records, so the charts of a run do not describe them.
MEANINGS = {
    "mismatch/inside_abs_mean": "Log-prob difference: mean over tokens inside both distributions (nats)",
    "mismatch/inside_abs_max": "Log-prob difference: maximum over tokens inside both distributions (nats)",
    "mismatch/tail_abs_mean": "Log-prob difference: mean over tokens of probability below 0.1 (nats)",
    "mismatch/head_abs_mean": "Log-prob difference: mean over tokens of probability 0.9 or more (nats)",
    "history/k3_first": "Divergence estimate k3: first quarter of the run's steps (nats per token)",
    "history/k3_last": "Divergence estimate k3: last quarter of the run's steps (nats per token)",
    "precision/argmax_flip_frac": "Positions where learner and sampler prefer different tokens (fraction)",
    "weights/mean": "Correction weight per token: mean",
    "weights/max": "Correction weight per token: maximum",
    "weights/ess_frac": "Effective sample size of the weights (fraction of the tokens)",
    "weights/zero_frac": "Tokens that the correction drops (fraction)",
}
MARKS = {"problem": "Problem", "watch": "Watch", "fine": "Fine"}


def diagnosis_sections(diagnosis: Diagnosis, findings: list[Finding]) -> list[Section]:
    """Sections of the page: findings, plots, metrics."""
    reading: list[Block] = [
        Text(f"{MARKS[f.level]}: {f.text}", "plain" if f.level == "fine" else "warning") for f in findings
    ]
    reading += [Text(f"Not measured: {line}.", "note") for line in diagnosis.left_out]
    sample = sampled(diagnosis.record, "the step's")
    return [
        Section("Reading", reading, THRESHOLDS),
        Section("Plots", record_blocks(diagnosis.record), f"{sample[0].upper()}{sample[1:]}."),
        Section("Numbers", [_table(rows, title) for title, rows in grouped(diagnosis.metrics)]),
    ]


def grouped(metrics: Mapping[str, float]) -> list[tuple[str, list[tuple[str, float]]]]:
    """(title, [(metric, value), ...]) per group, in the order of GROUPS."""
    found = []
    for prefix, title in GROUPS.items():
        rows = [(name, value) for name, value in metrics.items() if name.startswith(f"{prefix}/")]
        if rows:
            found.append((title, rows))
    return found


def explained(name: str) -> str:
    """Description of a metric with its unit, for page and terminal; empty for an unknown metric."""
    return MEANINGS.get(name) or meaning(name)


def _table(rows: list[tuple[str, float]], title: str) -> Table:
    columns = [Column("metric"), Column("value", "right"), Column("what it is")]
    return Table(columns, [[name, number(value), explained(name)] for name, value in rows], title)
