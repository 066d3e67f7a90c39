"""A short table from the rows of a run."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import geometric_mean

from harness import aligned, heads
from kernel_bench.measure import Row
from kernel_bench.shapes import FEW_ROWS

CASE = ("model", "layer", "n", "k", "routing", "m")  # what tells the cases of a section apart
HEAD = ["best peer's time / qarl's", f"M<={FEW_ROWS}", f"M>{FEW_ROWS}", "worst", "cases", "worst at"]


def ratios(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """By section, of every case that qarl and a peer ran: the best peer's row, and `ratio`, its time / qarl's."""
    cases: dict[tuple, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if "us" in row and "m" in row:  # older records have quantization, without rows
            cases[row["section"], *map(row.get, CASE)][row["who"]] = row
    found: dict[str, list[Row]] = defaultdict(list)
    for (section, *_), by in cases.items():
        ours = by.pop("qarl", None)
        if ours and by:
            best = min(by.values(), key=lambda row: row["us"])
            found[section].append(best | {"ratio": best["us"] / ours["us"]})
    return found


def _mean(cases: Sequence[Row]) -> str:
    return f"{geometric_mean([case['ratio'] for case in cases]):.2f}" if cases else "-"


def ratio_lines(rows: Sequence[Row]) -> list[str]:
    """One line per section: geometric means, the worst case, counts."""
    lines = []
    for section, cases in ratios(rows).items():
        worst = min(cases, key=lambda case: case["ratio"])
        means = [_mean([case for case in cases if (case["m"] <= FEW_ROWS) == few]) for few in (True, False)]
        where = f"{worst['n']}x{worst['k']}" if "n" in worst else f"{worst['model']} {worst['routing']}"
        where = f"M={worst['m']} {where} against {worst['who']}"
        lines.append([section, *means, f"{worst['ratio']:.2f}", str(len(cases)), where])
    return aligned([HEAD, *lines]) if lines else []


def failures(rows: Iterable[Row]) -> list[Row]:
    """Rows of qarl's kernels that raised or gave a wrong result."""
    return [row for row in rows if row["who"] == "qarl" and "skipped" in row]


def table(report: Row) -> str:
    """The summary of a report, as text: ratios, and what did not run or was wrong with how often."""
    rows = report["records"]
    skipped = Counter((row["section"], row["who"], row["skipped"]) for row in rows if "skipped" in row)
    lines = [f"skipped {count}x {section} {who}: {why}" for (section, who, why), count in skipped.items()]
    return "\n\n".join("\n".join(block) for block in (heads([report]), ratio_lines(rows), lines) if block)
