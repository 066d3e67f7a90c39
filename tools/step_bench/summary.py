"""Tables from the records of one run of tools/bench_step.py or several: rates, and their ratios to the peer's."""

from collections.abc import Iterable, Sequence
from typing import Any

from harness import Record, aligned, failures, heads

Rows = Sequence[Record]

HOW = ("shape", "layers", "vocabulary")  # what a model is
STEP = ("step_s", "rollout_s", "generate_s", "learner_s", "publish_s")


def table(reports: Sequence[Record]) -> str:
    """The summary, as text. A peer is compared with whatever report has it."""
    rows = [row for report in reports for row in report["records"]]
    blocks = [heads(reports), learner(rows), optimizer(rows), step(rows), failures(rows)]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def name_of(row: Record) -> str:
    return f"{row['shape']}, {row['layers']} layers, vocabulary {row['vocabulary']:,}"


def overrides(row: Record) -> str:
    """What differs from the defaults."""
    marks = ["TRL's output layer"] * (row.get("head") == "trl")
    return " ".join([*row.get("set", []), *marks])


def grouped(rows: Iterable[Record], *keys: str) -> dict[tuple[Any, ...], list[Record]]:
    """Rows by model and `keys`, in order."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in (*HOW, *keys)), []).append(row)
    return found


def cell(number: float | None, digits: int, scale: float = 1.0) -> str:
    """A number as text; empty if there is none."""
    return "" if number is None else f"{scale * number:.{digits}f}"


def over(number: float, peer: float | None) -> str:
    """`number` over the peer's, if there is a peer."""
    return cell(number / peer if peer else None, 2)


def learner(rows: Rows) -> list[str]:
    """Tokens per second of the learner beside Hugging Face's model: at each length, of each scheme."""
    lines = []
    measured = [row for row in rows if row["part"] in ("learner", "hf") and "tokens_per_s" in row]
    for case, mine in grouped(measured, "length", "tokens").items():
        lines.append(f"{name_of(mine[0])}: length {case[-2]:,}, {case[-1]:,} tokens per micro-batch")
        peers = {row["what"]: row["tokens_per_s"] for row in mine if row["part"] == "hf"}
        cells = [["", "tokens/s", "TFLOP/s", "ms", "host ms", "GiB", "expected", "over hf", ""]]
        for row in sorted(mine, key=lambda row: row["what"]):
            what = "forward" if row["what"] == "forward" else "+ backward"
            numbers = [cell(row["tokens_per_s"], 0), cell(row["tflops"], 1), cell(row["seconds"], 1, 1e3)]
            numbers += [cell(row["host_seconds"], 1, 1e3), cell(row["peak_gib"], 1), cell(row.get("estimated_gib"), 1)]
            ratio = over(row["tokens_per_s"], peers.get(row["what"]) if row["part"] != "hf" else None)
            cells.append([f"  {row.get('scheme', 'hf')} {row['recompute']} {what}", *numbers, ratio, overrides(row)])
        lines += aligned(cells)
    return lines


def optimizer(rows: Rows) -> list[str]:
    return [
        f"optimizer {name_of(row)} {row['scheme']} {row['optimizer']}, {row['what']}: {1e3 * row['seconds']:.1f} ms, "
        f"host {1e3 * row['host_seconds']:.1f} ms, {row['peak_gib']:.1f} GiB"
        for row in rows
        if row["part"] == "optimizer" and "seconds" in row
    ]


def step(rows: Rows) -> list[str]:
    """Seconds of a whole step beside TRL's, and how many times as long TRL's takes, on as many ranks."""
    found = [{"ranks": 1} | row for row in rows if row["part"] in ("step", "trl") and row.get("what") == "step"]
    lines = []
    for case, mine in grouped(found, "prompts", "responses", "new_tokens", "ranks").items():
        prompts, responses, tokens, ranks = case[-4:]
        where = f", {ranks} ranks" if ranks > 1 else ""
        lines.append(f"{name_of(mine[0])}: {prompts} prompts x {responses} responses of {tokens:,} tokens{where}")
        peer = next((row["seconds"] for row in mine if row["part"] == "trl"), None)
        cells = [["", *(key[:-2] for key in STEP), "GiB", "trl over it", ""]]
        for row in mine:
            own = row["part"] == "step"
            numbers = [*(cell(row.get(key), 2) for key in STEP), cell(row.get("peak_gib"), 1)]
            ratio = over(peer, row["seconds"]) if peer and own else ""
            several = [key for key in STEP[1:] if f"{key}_min" in row]
            spans = ", ".join(f"{key[:-2]} {row[f'{key}_min']:.2f} to {row[f'{key}_max']:.2f}" for key in several)
            rest = " ".join(filter(None, [overrides(row), spans and f"over ranks: {spans}"]))
            cells.append([f"  {row['scheme']} {row['engine']}" if own else "  trl", *numbers, ratio, rest])
        lines += aligned(cells)
    if any(row["part"] == "trl" for row in found):
        lines.append("trl's rollout holds generation, publishing and the log-probs at the snapshot")
    return lines
