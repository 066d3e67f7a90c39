"""A table from the records of one run of tools/bench_step.py or several, with the ratio to the peer."""

from collections.abc import Sequence
from typing import Any

from harness import Record, aligned, failures, heads

# What a row is compared by: the model, the work, and on how many ranks.
CASE = ("shape", "layers", "vocabulary", "what", "length", "tokens", "prompts", "responses", "new_tokens", "ranks")
PEERS = {"learner": "hf", "step": "trl"}
SECONDS = ("step_s", "rollout_s", "generate_s", "learner_s", "publish_s")
COLUMNS = {  # head -> key of a record
    **{"tokens/s": "tokens_per_s", "TFLOP/s": "tflops", "s": "seconds", "host s": "host_seconds"},
    **{name.removesuffix("_s"): name for name in SECONDS[1:]},
    **{"GiB": "peak_gib", "expected": "estimated_gib"},
}


def table(reports: Sequence[Record]) -> str:
    """The summary, as text. A peer is compared with whatever report has it."""
    rows = [row for report in reports for row in report["records"]]
    timed = [row for row in rows if "seconds" in row]
    peers = {(row["part"], *map(row.get, CASE)): row for row in timed}
    lines = [["", *COLUMNS, "over peer", ""]]
    for row in timed:
        peer = peers.get((PEERS.get(row["part"]), *map(row.get, CASE)))
        ratio = f"{peer['seconds'] / row['seconds']:.2f}" if peer else ""
        lines.append([_name(row), *(_cell(row.get(key)) for key in COLUMNS.values()), ratio, _notes(row)])
    blocks = [heads(reports), aligned(lines), failures(rows)]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _name(row: Record) -> str:
    keys = ("shape", "layers", "part", "scheme", "engine", "recompute", "optimizer", "what", "length")
    names = [str(row[key]) for key in keys if key in row]
    if "new_tokens" in row:
        names.append(f"{row['prompts']} x {row['responses']} x {row['new_tokens']}, {row.get('ranks', 1)} ranks")
    return " ".join(names)


def _cell(number: Any) -> str:
    return "" if number is None else f"{number:.0f}" if number >= 1000 else f"{number:.4g}"


def _notes(row: Record) -> str:
    """What differs from the defaults, and the spread over ranks."""
    spans = [f"{key[:-2]} {row[f'{key}_min']:.2f} to {row[f'{key}_max']:.2f}" for key in SECONDS if f"{key}_min" in row]
    return " ".join([*row.get("set", []), *["TRL's output layer"] * (row.get("head") == "trl"), *spans])
