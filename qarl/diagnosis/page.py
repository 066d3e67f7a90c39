"""The page of a diagnosis: the reading, the numbers it rests on, the plots. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qarl.diagnosis.reading import Finding
from qarl.report.blocks import Block, Column, Section, Table, Text
from qarl.report.diagnostics import record_blocks
from qarl.report.formatting import number

if TYPE_CHECKING:
    from qarl.diagnosis.measure import Diagnosis

GROUPS = {
    "mismatch": "Sampler and learner at the rollout's version",
    "history": "Over the run",
    "precision": "Precision, at the weights after the step",
    "policy": "Contributions C(r) = -(r - 1) A",
    "weights": "Correction weights",
    "gradients": "Gradient, clipping left aside",
    "deployed": "What is served, before and after the step",
    "quant": "Published values that the step changed",
    "error_tokens": "Repetitive and garbled stretches",
}
THRESHOLDS = (
    "Thresholds come from the runs that the papers show, and are ours where a paper gives none: they say where to "
    "look, and prove nothing."
)
MARKS = {"problem": "Problem", "watch": "Watch", "fine": "Fine"}


def diagnosis_sections(diagnosis: Diagnosis, findings: list[Finding]) -> list[Section]:
    """Reading, plots, numbers."""
    reading: list[Block] = [
        Text(f"{MARKS[f.level]}: {f.text}", "plain" if f.level == "fine" else "warning") for f in findings
    ]
    reading += [Text(f"Not measured: {line}.", "note") for line in diagnosis.left_out]
    count, shown = diagnosis.record["token_count"], len(diagnosis.record["tokens"]["logp"])
    sample = (
        f"A sample of {shown:,} of the step's {count:,} tokens." if shown < count else f"The step's {count:,} tokens."
    )
    return [
        Section("Reading", reading, THRESHOLDS),
        Section("Plots", record_blocks(diagnosis.record), sample),
        Section("Numbers", [_table(rows, title) for title, rows in grouped(diagnosis.metrics)]),
    ]


def grouped(metrics: Mapping[str, float]) -> list[tuple[str, list[tuple[str, float]]]]:
    """(what they are about, (metric, value)...) in the order of GROUPS."""
    found = []
    for prefix, title in GROUPS.items():
        rows = [(name, value) for name, value in metrics.items() if name.startswith(f"{prefix}/")]
        if rows:
            found.append((title, rows))
    return found


def _table(rows: list[tuple[str, float]], title: str) -> Table:
    columns = [Column("metric"), Column("value", "right")]
    return Table(columns, [[name, number(value)] for name, value in rows], title)
