"""Tables from the records of one run of tools/bench_step.py or several: rates, and their ratios to the peer's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from harness import Record, failures, heads

Rows = Sequence[Record]

HOW = ("shape", "layers", "vocabulary")  # what a model is
STEP = ("step_s", "rollout_s", "generate_s", "learner_s", "publish_s")


def table(reports: Sequence[Record]) -> str:
    """The summary, as text. A peer is compared with whatever report has it."""
    rows = [row for report in reports for row in report["records"]]
    blocks = [heads(reports), learner(rows), optimizer(rows), sharded(rows), step(rows), failures(rows)]
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


def learner(rows: Rows) -> list[str]:
    """Tokens per second of the learner beside Hugging Face's model: at each length, of each scheme."""
    lines = []
    measured = [row for row in rows if row["part"] in ("learner", "hf") and "tokens_per_s" in row]
    for case, mine in grouped(measured, "length", "tokens").items():
        lines.append(f"{name_of(mine[0])}: length {case[-2]:,}, {case[-1]:,} tokens per micro-batch")
        lines.append(
            f"  {'':26} {'tokens/s':>9} {'TFLOP/s':>8} {'ms':>8} {'host ms':>8} {'GiB':>6} {'expected':>8}  over hf"
        )
        peers = {row["what"]: row["tokens_per_s"] for row in mine if row["part"] == "hf"}
        for row in sorted(mine, key=lambda row: row["what"]):
            peer = peers.get(row["what"]) if row["part"] != "hf" else None
            ratio = f"{row['tokens_per_s'] / peer:8.2f}" if peer else ""
            expected = f"{row['estimated_gib']:8.1f}" if row.get("estimated_gib") else f"{'':8}"
            name = f"{row.get('scheme', 'hf'):9} {row['recompute']:5} "
            name += "forward   " if row["what"] == "forward" else "+ backward"
            lines.append(
                f"  {name} {row['tokens_per_s']:9.0f} {row['tflops']:8.1f} {1e3 * row['seconds']:8.1f} "
                f"{1e3 * row['host_seconds']:8.1f} {row['peak_gib']:6.1f} {expected} {ratio} {overrides(row)}"
            )
    return lines


def optimizer(rows: Rows) -> list[str]:
    return [
        f"optimizer {name_of(row)} {row['scheme']} {row['optimizer']}, {row['what']}: {1e3 * row['seconds']:.1f} ms, "
        f"host {1e3 * row['host_seconds']:.1f} ms, {row['peak_gib']:.1f} GiB"
        for row in rows
        if row["part"] == "optimizer" and "seconds" in row
    ]


def sharded(rows: Rows) -> list[str]:
    """The sharded learner beside its peer: tokens per second of a rank, their ratio, and gigabytes received."""
    measured = [row for row in rows if row["part"] in ("sharded", "zero3") and "seconds" in row]
    lines = []
    for mine in grouped(measured, "ranks").values():
        batches = [row for row in mine if row["what"] == "micro-batch"]
        peer = next((row["tokens_per_s"] for row in batches if row["part"] == "zero3"), None)
        lines.append(f"{name_of(mine[0])}: {mine[0]['ranks']} ranks; per rank:")
        lines.append(f"  {'':16} {'tokens/s':>9} {'over zero3':>10} {'ms':>8} {'update ms':>9} {'GiB':>6}  GB received")
        for row, update in zip(batches, (row for row in mine if row["what"] == "update"), strict=False):
            ratio = f"{row['tokens_per_s'] / peer:10.2f}" if peer else f"{'':10}"
            name = f"{row['part']} {row['scheme']}"
            lines.append(
                f"  {name:16} {row['tokens_per_s']:9.0f} {ratio} {1e3 * row['seconds']:8.1f} "
                f"{1e3 * update['seconds']:9.1f} {max(row['peak_gib'], update['peak_gib']):6.1f}  "
                f"{received(row)}; an update {received(update)} {overrides(row)}".rstrip()
            )
    return lines


def received(row: Record) -> str:
    """Gigabytes by kind."""
    return ", ".join(f"{1e-9 * size:.3g} {kind}" for kind, size in row["received_bytes_by_kind"].items()) or "none"


def step(rows: Rows) -> list[str]:
    """Seconds of a whole step beside TRL's, and how many times as long TRL's takes, on as many ranks."""
    found = [{"ranks": 1} | row for row in rows if row["part"] in ("step", "trl") and row.get("what") == "step"]
    lines = []
    for case, mine in grouped(found, "prompts", "responses", "new_tokens", "ranks").items():
        prompts, responses, tokens, ranks = case[-4:]
        where = f", {ranks} ranks" if ranks > 1 else ""
        lines.append(f"{name_of(mine[0])}: {prompts} prompts x {responses} responses of {tokens:,} tokens{where}")
        lines.append(f"  {'':14}{''.join(f'{key[:-2]:>10}' for key in STEP)}{'GiB':>8}    trl over it")
        peer = next((row["seconds"] for row in mine if row["part"] == "trl"), None)
        for row in mine:
            who = "trl" if row["part"] == "trl" else f"{row['scheme']} {row['engine']}"
            seconds = "".join(f"{row[key]:10.2f}" if key in row else f"{'':10}" for key in STEP)
            memory = f"{row['peak_gib']:8.1f}" if "peak_gib" in row else f"{'':8}"
            ratio = f"{peer / row['seconds']:8.2f}" if peer and row["part"] != "trl" else ""
            lines.append(f"  {who:14}{seconds}{memory} {ratio} {overrides(row)}")
            spans = [
                f"{key[:-2]} {row[f'{key}_min']:.2f} to {row[f'{key}_max']:.2f}"
                for key in STEP[1:]
                if f"{key}_min" in row
            ]
            lines += [f"  {'':14} over ranks: {', '.join(spans)}"] * bool(spans)
    if any(row["part"] == "trl" for row in found):
        lines.append("trl's rollout holds generation, publishing and the log-probs at the snapshot")
    return lines
