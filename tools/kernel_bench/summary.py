"""A short table from the rows of a run."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import geometric_mean
from typing import Any

from harness import aligned, heads
from kernel_bench.shapes import FEW_ROWS, SCHEMES

Row = dict[str, Any]


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


def by_scheme(rows: Iterable[Row], *keys: str) -> dict[str, list[Row]]:
    """`ratios` of each scheme."""
    grouped: dict[str, list[Row]] = defaultdict(list)
    for case in ratios(rows, *keys):
        grouped[case["scheme"]].append(case)
    return grouped


def _mean(cases: Sequence[Row]) -> str:
    return f"{geometric_mean([case['ratio'] for case in cases]):.2f}" if cases else "-"


def product_lines(rows: Sequence[Row]) -> list[str]:
    """One line per scheme: geometric means, the worst case, counts."""
    head = ["best peer's time / qarl's", f"M<={FEW_ROWS}", f"M>{FEW_ROWS}", "worst", "cases", "worst at"]
    lines = []
    for scheme, cases in by_scheme([row for row in rows if row["section"] in SCHEMES], "n", "k", "m").items():
        worst = min(cases, key=lambda case: case["ratio"])
        means = [_mean([case for case in cases if (case["m"] <= FEW_ROWS) == decode]) for decode in (True, False)]
        where = f"M={worst['m']} {worst['n']}x{worst['k']} against {worst['peer']}"
        lines.append([scheme, *means, f"{worst['ratio']:.2f}", str(len(cases)), where])
    return aligned([head, *lines]) if lines else []


def expert_lines(rows: Sequence[Row]) -> list[str]:
    """One line per scheme of grouped products: geometric mean, the worst case."""
    experts = [row for row in rows if row["section"].startswith("experts ")]
    lines = []
    for scheme, cases in by_scheme(experts, "model", "routing", "m").items():
        worst = min(cases, key=lambda case: case["ratio"])
        where = f"{worst['routing']} m={worst['m']} against {worst['peer']}"
        lines.append([scheme, _mean(cases), f"{worst['ratio']:.2f}", str(len(cases)), where])
    return aligned([["best peer's time / qarl's", "mean", "worst", "cases", "worst at"], *lines]) if lines else []


def memory_lines(rows: Sequence[Row]) -> list[str]:
    """One line per operation: share of copy bandwidth, qarl's and vLLM's, lowest over the matrices."""
    shares: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["section"] == "quantize" and "share" in row:
            shares[row["operation"]][row["who"]].append(row["share"])
    lines = []
    for operation, found in shares.items():
        ours, theirs = found["qarl"], found["vllm"]
        numbers = (min(ours, default=None), sum(ours) / len(ours) if ours else None, min(theirs, default=None))
        lines.append([operation, *("-" if number is None else f"{number:.0%}" for number in numbers)])
    return aligned([["share of copy bandwidth", "lowest", "mean", "vLLM"], *lines]) if lines else []


def skipped_lines(rows: Iterable[Row]) -> list[str]:
    """What did not run or was wrong: one line per kernel and reason, with how often."""
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
