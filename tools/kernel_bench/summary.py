"""A short table from the rows of a run."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from harness import heads
from kernel_bench.shapes import FEW_ROWS, SCHEMES

Row = dict[str, Any]


def geometric_mean(values: Sequence[float]) -> float:
    """Raises ValueError for no values, or one that is not positive."""
    if not values or min(values) <= 0:
        raise ValueError(f"a geometric mean needs positive values, not {list(values)[:5]}")
    return math.exp(sum(map(math.log, values)) / len(values))


def ratios(rows: Iterable[Row], *keys: str) -> list[Row]:
    """best peer's time / qarl's time of every case that both ran: `scheme`, the `keys` that tell cases apart, `ratio`,
    `peer`."""
    times: dict[tuple, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if "us" in row and all(key in row for key in keys):
            times[row["section"], *(row[key] for key in keys)][row["who"]] = row["us"]
    found = []
    for case, by in times.items():
        peers = {who: us for who, us in by.items() if who != "qarl"}
        if "qarl" in by and peers:
            peer = min(peers, key=peers.__getitem__)
            labels = dict(zip(("scheme", *keys), case, strict=True))
            found.append(labels | {"ratio": peers[peer] / by["qarl"], "peer": peer})
    return found


def _mean(cases: Sequence[Row]) -> str:
    return f"{geometric_mean([case['ratio'] for case in cases]):.2f}" if cases else "-"


def product_lines(rows: Sequence[Row]) -> list[str]:
    """One line per scheme: geometric means, the worst case, counts."""
    grouped: dict[str, list[Row]] = defaultdict(list)
    for case in ratios([row for row in rows if row["section"] in SCHEMES], "n", "k", "m"):
        grouped[case["scheme"]].append(case)
    if not grouped:
        return []
    few, many = f"M<={FEW_ROWS}", f"M>{FEW_ROWS}"
    lines = [f"best peer's time / qarl's   {few:>7} {many:>7} {'worst':>6} {'cases':>6}  worst at"]
    for scheme, cases in grouped.items():
        worst = min(cases, key=lambda case: case["ratio"])
        means = [_mean([case for case in cases if (case["m"] <= FEW_ROWS) == decode]) for decode in (True, False)]
        where = f"M={worst['m']} {worst['n']}x{worst['k']} against {worst['peer']}"
        lines.append(f"{scheme:27} {means[0]:>7} {means[1]:>7} {worst['ratio']:6.2f} {len(cases):6}  {where}")
    return lines


def expert_lines(rows: Sequence[Row]) -> list[str]:
    """One line per scheme of grouped products: geometric mean, the worst case."""
    grouped: dict[str, list[Row]] = defaultdict(list)
    for case in ratios([row for row in rows if row["section"].startswith("experts ")], "model", "routing", "m"):
        grouped[case["scheme"]].append(case)
    lines = ["best peer's time / qarl's"] if grouped else []
    for scheme, cases in grouped.items():
        worst = min(cases, key=lambda case: case["ratio"])
        where = f"of {len(cases):3} cases, at {worst['routing']} m={worst['m']} against {worst['peer']}"
        lines.append(f"{scheme:17} mean {_mean(cases)}  worst {worst['ratio']:.2f}  {where}")
    return lines


def memory_lines(rows: Sequence[Row]) -> list[str]:
    """One line an operation: share of copy bandwidth, qarl's and vLLM's, lowest over the matrices."""
    shares: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["section"] == "quantize" and "share" in row:
            shares[row["operation"]][row["who"]].append(row["share"])
    if not shares:
        return []
    lines = [f"{'share of copy bandwidth':27} {'lowest':>7} {'mean':>7} {'vLLM':>7}"]
    for operation, found in shares.items():
        ours, theirs = found.get("qarl", []), found.get("vllm", [])
        low, mean = (f"{min(ours):.0%}", f"{sum(ours) / len(ours):.0%}") if ours else ("-", "-")
        lines.append(f"{operation:27} {low:>7} {mean:>7} {f'{min(theirs):.0%}' if theirs else '-':>7}")
    return lines


def skipped_lines(rows: Iterable[Row]) -> list[str]:
    """What did not run or was wrong: one line a kernel and reason, with how often."""
    counts: dict[tuple[str, str, str], int] = defaultdict(int)
    for row in rows:
        if "skipped" in row:
            counts[row["section"], row["who"], row["skipped"]] += 1
    return [f"skipped {count}x {section} {who}: {why}" for (section, who, why), count in counts.items()]


def failures(rows: Iterable[Row]) -> list[Row]:
    """Rows of qarl's kernels that raised or gave a wrong result."""
    return [row for row in rows if row["who"] == "qarl" and "skipped" in row and "device memory" not in row["skipped"]]


def table(report: Row) -> str:
    """The summary of a report, as text."""
    rows = report["records"]
    blocks = [
        [*heads([report]), f"copy: {report['copy_tbps']:.2f} TB/s"],
        product_lines(rows),
        expert_lines(rows),
        memory_lines(rows),
        skipped_lines(rows),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)
