"""A table of the sharded learner beside its peer: tokens per second, their ratio, bytes."""

from __future__ import annotations

from collections.abc import Sequence

from harness import Record


def table(records: Sequence[Record], shape: str, ranks: int) -> str:
    """Of the records of `learn` and `zero3`, joined. Rates and bytes are a rank's."""
    rows = [record for record in records if record["what"] == "micro-batch"]
    updates = [record for record in records if record["what"] == "update"]
    peer = next((row["tokens_per_s"] for row in rows if row["part"] == "zero3"), float("nan"))
    lines = [
        f"{shape}, {ranks} ranks, {rows[0]['tokens']:,} tokens per micro-batch; of a rank:",
        f"{'':22} {'tokens/s':>9} {'over zero3':>10} {'ms':>8} {'update ms':>9} {'GiB':>6}  GB received: a micro-batch",
    ]
    for row, update in zip(rows, updates, strict=True):
        name = f"{row['part']} {row['scheme']}" + f" offload {row['offload']}" * (row["offload"] is not None)
        name += " TRL's head" * (row.get("head") == "trl")
        lines.append(
            f"{name:22} {row['tokens_per_s']:9.0f} {row['tokens_per_s'] / peer:10.2f} {1e3 * row['seconds']:8.1f} "
            f"{1e3 * update['seconds']:9.1f} {max(row['peak_gib'], update['peak_gib']):6.1f}  "
            f"{received(row)}; an update {received(update)}"
        )
    return "\n".join(lines)


def received(record: Record) -> str:
    """Gigabytes by kind."""
    return ", ".join(f"{1e-9 * size:.3g} {kind}" for kind, size in record["received_bytes_by_kind"].items()) or "none"
