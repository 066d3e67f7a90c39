"""Tables from the records of one run of tools/bench_step.py or several: rates, and their ratios to the peer's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Record = dict[str, Any]
Rows = Sequence[Record]

HOW = ("shape", "layers", "vocabulary")  # what a model is
STEP = ("step_s", "rollout_s", "generate_s", "learner_s", "publish_s")


def table(reports: Sequence[Record]) -> str:
    """The summary, as text. A peer is compared with whatever report has it."""
    rows = [row for report in reports for row in report["records"]]
    blocks = [
        [head(report) for report in reports],
        learner(rows),
        canary(rows),
        decode(rows),
        learn(rows),
        optimizer(rows),
        step(rows),
        capped(rows),
    ]
    return "\n\n".join("\n".join(block) for block in [*blocks, errors(rows)] if block)


def head(report: Record) -> str:
    environment = report["environment"] or {}
    packages = environment.get("packages", {})
    device = ", ".join(environment.get("gpus", [])) or environment.get("cpu", "unknown device")
    names = [
        f"{name} {packages[name]}" for name in ("torch", "triton", "transformers", "vllm", "trl") if name in packages
    ]
    return ", ".join([device, *names, f"revision {environment.get('git_revision')}"])


def name_of(row: Record) -> str:
    return f"{row['shape']}, {row['layers']} layers, vocabulary {row['vocabulary']:,}"


def overrides(row: Record) -> str:
    """What is not as it is by default."""
    marks = ["TRL's output layer"] * (row.get("head") == "trl")
    marks += [f"ZeRO-{row['zero_stage']}"] if row.get("zero_stage") else []
    marks += [f"of {row['gpu_memory_gib']:g} GiB"] if row.get("gpu_memory_gib") else []
    return " ".join([*row.get("set", []), *marks])


def cases(rows: Iterable[Record], *keys: str) -> list[tuple[Any, ...]]:
    """Each combination of what a model is and of `keys` that there is, in order."""
    return list(dict.fromkeys(tuple(row[key] for key in (*HOW, *keys)) for row in rows))


def matching(rows: Iterable[Record], case: tuple[Any, ...], *keys: str) -> list[Record]:
    return [row for row in rows if tuple(row[key] for key in (*HOW, *keys)) == case]


def learner(rows: Rows) -> list[str]:
    """Tokens per second of the learner beside Hugging Face's model: at each length, of each scheme."""
    found = [row for row in rows if row["part"] in ("learner", "hf") and "tokens_per_s" in row]
    lines = []
    for case in cases(found, "length", "tokens"):
        mine = matching(found, case, "length", "tokens")
        lines.append(f"{name_of(mine[0])}: length {case[-2]:,}, {case[-1]:,} tokens a micro-batch")
        peers = [row for row in mine if row["part"] == "hf"]
        lines.append(
            f"  {'':26} {'tokens/s':>9} {'TFLOP/s':>8} {'ms':>8} {'host ms':>8} {'GiB':>6} {'expected':>8}  over hf"
        )
        for what in ("forward", "forward_backward"):
            peer = next((row["tokens_per_s"] for row in peers if row["what"] == what), None)
            for row in (row for row in mine if row["what"] == what):
                who = "hf" if row["part"] == "hf" else row["scheme"]
                ratio = f"{row['tokens_per_s'] / peer:8.2f}" if peer and row["part"] != "hf" else ""
                expected = f"{row['estimated_gib']:8.1f}" if row.get("estimated_gib") else f"{'':8}"
                name = f"{who:9} {row['recompute']:5} {'forward' if what == 'forward' else '+ backward':10}"
                lines.append(
                    f"  {name} {row['tokens_per_s']:9.0f} {row['tflops']:8.1f} {1e3 * row['seconds']:8.1f} "
                    f"{1e3 * row['host_seconds']:8.1f} {row['peak_gib']:6.1f} {expected} {ratio} {overrides(row)}"
                )
    return lines + kernels(found)


def kernels(rows: Rows) -> list[str]:
    """What takes the most time of a forward and backward, where it was asked for."""
    lines = []
    for row in rows:
        if row["what"] == "forward_backward" and "kernels" in row:
            who = "hf" if row["part"] == "hf" else row["scheme"]
            lines.append(f"{name_of(row)}, {who}, length {row['length']:,}: ms, calls")
            lines += [f"  {found['ms']:9.2f} {found['calls']:6} {found['name'][:100]}" for found in row["kernels"]]
    return lines


def canary(rows: Rows) -> list[str]:
    found = [row for row in rows if row["part"] == "canary" and "seconds" in row]
    return [
        f"canary {name_of(row)} {row['scheme']}, {row['tokens']} tokens, {row['what']}: "
        f"{1e3 * row['seconds']:.1f} ms, host {1e3 * row['host_seconds']:.1f} ms"
        for row in found
    ]


def decode(rows: Rows) -> list[str]:
    """One decode forward, what takes the most of it, and attention alone with each of its candidates."""
    lines = []
    for row in (row for row in rows if row["part"] == "decode" and "seconds" in row):
        what = row["what"] + "".join(f" {number}" for number in row.get("candidate", []))
        what += ", KV fp8" * (row.get("kv_cache_dtype") == "fp8")
        lines.append(
            f"decode {name_of(row)} {row['scheme']}, {row['batch']} x {row['context']:,}, {what}: "
            f"{1e3 * row['seconds']:.3f} ms, {row['tb_per_s']:.2f} TB/s" + " OTHER BITS" * (not row.get("same", True))
        )
        for found in row.get("kernels", []):
            lines.append(f"  {found['ms']:9.3f} {found['calls']:6} {found['name'][:100]}")
    return lines


def learn(rows: Rows) -> list[str]:
    found = [row for row in rows if row["part"] == "learn" and "seconds" in row]
    return [
        f"learn {name_of(row)} {row['scheme']} {row['recompute']}, {row['prompts']} prompts x {row['responses']} "
        f"responses of {row['new_tokens']:,} tokens, memory {row['what']}: {row['seconds']:.2f} s, "
        f"{row['tokens_per_s']:.0f} tokens/s, {row['allocations']} allocations, {row['peak_gib']:.1f} GiB "
        f"{overrides(row)}".rstrip()
        for row in found
    ]


def optimizer(rows: Rows) -> list[str]:
    found = [row for row in rows if row["part"] == "optimizer" and "seconds" in row]
    return [
        f"optimizer {name_of(row)} {row['scheme']} {row['optimizer']}, {row['what']}: {1e3 * row['seconds']:.1f} ms, "
        f"host {1e3 * row['host_seconds']:.1f} ms, {row['peak_gib']:.1f} GiB"
        for row in found
    ]


def step(rows: Rows) -> list[str]:
    """Seconds of a whole step beside TRL's, and how many times as long TRL's takes, on as many ranks."""
    found = [{"ranks": 1} | row for row in rows if row["part"] in ("step", "trl") and row.get("what") == "step"]
    lines = []
    keys = ("prompts", "responses", "new_tokens", "ranks")
    for case in cases(found, *keys):
        mine = matching(found, case, *keys)
        prompts, responses, tokens, ranks = case[-4:]
        where = f", {ranks} ranks" if ranks > 1 else ""
        lines.append(
            f"{name_of(mine[0])}: a step of {prompts} prompts x {responses} responses of {tokens:,} tokens{where}"
        )
        heads = "".join(f"{key.removesuffix('_s'):>10}" for key in STEP)
        lines.append(f"  {'':14}{heads}{'GiB':>8}    trl over it")
        peer = next((row["seconds"] for row in mine if row["part"] == "trl"), None)
        for row in mine:
            who = "trl" if row["part"] == "trl" else f"{row['scheme']} {row['engine']}"
            seconds = "".join(f"{row[key]:10.2f}" if key in row else f"{'':10}" for key in STEP)
            memory = f"{row['peak_gib']:8.1f}" if "peak_gib" in row else f"{'':8}"
            ratio = f"{peer / row['seconds']:8.2f}" if peer and row["part"] != "trl" else ""
            lines.append(f"  {who:14}{seconds}{memory} {ratio} {overrides(row)}")
            if f"{STEP[0]}_min" in row:
                spans = [
                    f"{key.removesuffix('_s')} {row[f'{key}_min']:.2f} to {row[f'{key}_max']:.2f}"
                    for key in STEP[1:]
                    if f"{key}_min" in row
                ]
                lines.append(f"  {'':14} over ranks: {', '.join(spans)}")
    if any(row["part"] == "trl" for row in found):
        lines.append("trl's rollout holds generation, publishing and the log-probs at the snapshot")
    return lines


def capped(rows: Rows) -> list[str]:
    """What processes had whose GPU counted as smaller than it is."""
    return [
        f"{row['part']} {name_of(row)} {row.get('scheme', '')}, at most {row['gpu_memory_gib']:g} GiB: torch had "
        f"{row['reserved_gib']:.1f} GiB, {row['beside_gib']:.1f} GiB were in use beside it"
        for row in rows
        if row.get("what") == "capped"
    ]


def errors(rows: Rows) -> list[str]:
    """What did not run."""
    return [
        f"failed: {' '.join(str(row[key]) for key in ('part', 'shape', 'scheme', 'length') if key in row)}: "
        f"{row['error']}"
        for row in rows
        if "error" in row
    ]
