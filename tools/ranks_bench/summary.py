"""A table of the learner in rows beside its peer: tokens per second, their ratio, bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness import Record


def table(records: Sequence[Record], shape: str, ranks: int) -> str:
    """Of the records of `learn` and `zero3`, joined. Rates and bytes are a rank's."""
    rows = [record for record in records if _is_row(record)]
    peer = next((row["tokens_per_s"] for row in rows if row["part"] == "zero3"), float("nan"))
    lines = [
        f"{shape}, {ranks} ranks, {rows[0]['tokens']:,} tokens a micro-batch; of a rank:",
        f"{'':22} {'tokens/s':>9} {'over zero3':>10} {'ms':>8} {'update ms':>9} {'GiB':>6}  GB received: a micro-batch",
    ]
    for row in rows:
        update = next(record for record in records if _same(record, row) and record["what"] == "update")
        name = f"{row['part']} {row['scheme']}"
        name += f" offload {row['offload']}" if row["offload"] else ""
        name += " TRL's head" if row.get("head") == "trl" else ""
        lines.append(
            f"{name:22} {row['tokens_per_s']:9.0f} {row['tokens_per_s'] / peer:10.2f} {1e3 * row['seconds']:8.1f} "
            f"{1e3 * update['seconds']:9.1f} {max(row['peak_gib'], update['peak_gib']):6.1f}  "
            + "; an update ".join(", ".join(_kinds(one)) or "none" for one in (row, update))
        )
    return "\n".join(lines)


def _is_row(record: Record) -> bool:
    return record.get("what") == "micro-batch" and record["exchange"] == "with messages"


def _same(record: Record, row: Record) -> bool:
    keys = ("part", "scheme", "offload", "exchange", "head")
    return all(record.get(key) == row.get(key) for key in keys)


def _kinds(record: Record) -> Iterator[str]:
    for kind, size in record["received_bytes_by_kind"].items():
        yield f"{1e-9 * size:.3g} {kind}"
