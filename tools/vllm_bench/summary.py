"""A short table from the records of one run or several."""

from __future__ import annotations

from collections.abc import Sequence

from harness import Record, failures, heads


def table(reports: Sequence[Record]) -> str:
    """The summary of reports, as text."""
    records = [record for report in reports for record in report["records"]]
    blocks = [heads(reports), engine_lines(records), failures(records)]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def engine_lines(records: Sequence[Record]) -> list[str]:
    """One line per start and measurement."""
    lines = [f"{'engine':38} {'seconds':>9}  more"]
    for row in records:
        if "seconds" in row:
            name = " ".join(row[key] for key in ("shape", "scheme", "kernels", "what"))
            name += " (KV fp8)" * (row.get("kv_cache_dtype") == "fp8")
            lines.append(f"{name:38} {row['seconds']:9.3f}  {_more(row)}")
    return lines


def _more(row: Record) -> str:
    what = row["what"]
    if what == "start":
        found = f"{row['gib']:.2f} GiB, proved {row['proved_frac']:.3f}, canary {row['canary_mean']:.4f}"
        return ", ".join([found, *(f"{name} {seconds:.2f}" for name, seconds in row.get("phases", {}).items())])
    if what == "generate":
        rates = f"first tokens {row['first_token_s']:.3f} s, later ones {1e3 * row['later_token_s']:.2f} ms each"
        return f"batch {row['batch']}: {row['tokens_per_s']:.0f} tokens/s, {rates}"
    if what.startswith("sleep"):
        again = f"wake and publish {row['wake_and_publish_s']:.3f} s"
        return f"freed {row['freed_gib']:.2f} GiB, wake {row['wake_s']:.3f} s, {again}"
    parts = ", ".join(f"{part} {row[f'{part}_s']:.3f}" for part in ("receive", "load", "check", "score"))
    return f"sent {row['sent_frac']:.2%} ({row['sent_mib']:.1f} MiB), {parts}, canary {row['canary_mean']:.4f}"
