"""Plots of one step's diagnostics, from RUN/diagnostics/NNNNNN.json. Does not import torch."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qarl.inputs.files import Unreadable
from qarl.inputs.json import read_json_object
from qarl.inputs.schema import checked
from qarl.report.blocks import (
    Block,
    Chart,
    Excerpt,
    Excerpts,
    Histogram,
    LineChart,
    Points,
    Scatter,
    Section,
    Series,
    Text,
)
from qarl.report.formatting import number
from qarl.storage.diagnostics_record import FORMAT_VERSION, DiagnosticsRecord
from qarl.storage.names import step_files

EARLIER = 3  # number of earlier steps shown next to the last one
Column = np.ndarray  # (T,) float64; NaN for missing values


def diagnostics_section(run: Path) -> Section:
    """Return plots of the last recorded step, with deciles of earlier ones; empty without records."""
    records, damaged = read_diagnostics(run)
    blocks: list[Block] = [Text(f"diagnostics/{name}: cannot be read and is omitted.", "warning") for name in damaged]
    if not records:
        return Section("Diagnostics", blocks)
    blocks += record_blocks(records[-1])
    if len(records) > 1:
        blocks[:] = _with_chart(blocks, _deciles_over_steps(records))
    return Section("Diagnostics", blocks, f"Step {records[-1]['step']}: {sampled(records[-1], 'its')}.")


def sampled(record: Mapping[str, Any], whose: str) -> str:
    """Return `a sample of 4,000 of its 9,000 tokens`, or `its 4,000 tokens` if the record has all of them."""
    count, shown = record["token_count"], len(record["tokens"]["logp_sampler"])
    return f"{f'a sample of {shown:,} of ' if shown < count else ''}{whose} {count:,} tokens"


def read_diagnostics(run: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a run's records by step, and the names of unreadable files."""
    records, damaged = [], []
    for path in step_files(run / "diagnostics", ".json").values():
        try:
            record = read_json_object(path, surrogates=True)
            known = checked(DiagnosticsRecord, record, str(path)).format_version == FORMAT_VERSION
        except Unreadable:
            known = False
        if known:
            records.append(record)
        else:
            damaged.append(path.name)
    return records, damaged


def record_blocks(record: Mapping[str, Any]) -> list[Block]:
    """Return the plots of one record and its examples of error tokens."""
    tokens: dict[str, Any] = {
        name: None if column is None else np.asarray(column, dtype=np.float64)  # None becomes NaN
        for name, column in record["tokens"].items()
    }
    sampler, old, shadow = tokens["logp_sampler"], tokens["logp_old"], tokens["logp_shadow"]
    signs = _by_sign(tokens["advantage"])
    notes: list[Block] = []  # instead of charts that would show nothing
    charts: list[Block] = [
        Scatter(
            "Log-probs of sampler and learner",
            "log-prob, sampler",
            "log-prob, learner at the rollout (nats)",
            _classes(sampler, old, signs),
            diagonal=True,
            note="The two agree on the line.",
        )
    ]
    gaps = abs(old - sampler)
    if np.nan_to_num(gaps).any():
        charts += [_gap_by_probability(sampler, gaps, record["deciles"]), *_gap_charts(record)]
    else:
        notes.append(Text("Sampler and learner gave each of these tokens the same log-prob, bit for bit.", "note"))
    if record["band"] or np.nan_to_num(tokens["log_ratio"]).any():
        charts.append(_ratios(tokens, record["band"]))
    if shadow is not None:
        alpha, beta = shadow - sampler, tokens["logp"] - shadow
        if np.nan_to_num(beta).any():
            charts.append(_precision(alpha, beta, signs))
        else:
            notes.append(Text("The learner uses the sampler's arithmetic: beta is 0 for all of these tokens.", "note"))
    if tokens["weight"] is not None:
        charts.append(Histogram("Correction weights", "weight of a token", "tokens", tokens["weight"].tolist()))
    if record["layers"]:
        charts.append(_crossings(record["layers"]))
    if record.get("backward"):
        charts.append(_backward(record["backward"]))
    if record.get("routing"):
        charts += _routing(record["routing"])
    return [*notes, *charts, *_examples(record["error_examples"])]


def _gap_by_probability(sampler: Column, gaps: Column, deciles: list[dict[str, Any]]) -> Scatter:
    line = Series("mean per decile, all tokens", _middles(deciles), [row["delta_abs_mean"] for row in deciles])
    return Scatter(
        "Log-prob difference by probability",
        "probability of the token, sampler",
        "|delta| (nats)",
        _classes(np.exp(sampler), gaps, [("token", np.ones(len(gaps), dtype=bool))]),
        line=line,
        log_y=True,
    )


def _gap_charts(record: Mapping[str, Any]) -> list[Block]:
    """Return charts of the gap by position, by response length, and by probability in the tail."""
    axes = {
        "positions": ("by position", "position in the response (log2)", lambda row: math.log2(row["low"] + 1)),
        "lengths": ("by response length", "response length in tokens (log2)", lambda row: math.log2(row["low"])),
        "tail": ("in the tail", "probability, sampler (log10)", lambda row: math.log10(max(row["low"], 1e-7))),
    }
    charts: list[Block] = []
    for name, (title, label, position) in axes.items():
        rows = record.get(name) or []
        if len(rows) > 1:
            gaps = [row["delta_abs_mean"] for row in rows]
            series = [Series("all tokens", [position(row) for row in rows], gaps)]
            charts.append(LineChart(f"Log-prob difference {title}", label, "mean |delta| (nats)", series, log_y=True))
    return charts


def _ratios(tokens: Mapping[str, Any], band: Mapping[str, Any] | None) -> Scatter:
    """Plot the objective's ratios by the learner's log-prob, inside and outside of the band."""
    # Values beyond 20 stand for an infinite log-ratio: the token is outside a truncated distribution.
    log_ratio = tokens["log_ratio"]
    ratio = np.exp(np.where(abs(log_ratio) > 20.0, np.nan, log_ratio))
    none = np.zeros(len(ratio))
    outside, phantom = ((none if mask is None else mask) > 0 for mask in map(tokens.get, ("outside", "phantom")))
    classes = [("inside the band" if band else "ratio", ~outside)]
    if band:
        classes.append(("clipped", outside & ~phantom))
    if band and tokens["logp_shadow"] is not None:
        classes.append(("clipped by precision alone", outside & phantom))
    sizes = ratio[ratio > 0]
    edges, note = None, "This objective never clips."
    if band:
        edges = (band["low"], band["high"])
        note = f"Shaded: the band, {number(band['low'], 6)} for A < 0 to {number(band['high'], 6)} for A > 0"
        note += f", and up to {number(band['neg_high'], 6)} for A < 0." if band["neg_high"] is not None else "."
        if band["level"] == "sequence":
            note += " The band is of a response's mean ratio, so all its tokens are inside or clipped together."
        if tokens["logp_shadow"] is None:
            note += " Clipping by precision alone is unknown without a shadow forward (diagnostics.shadow_every)."
    return Scatter(
        "Ratio of the objective",
        "log-prob, learner",
        "ratio",
        _classes(tokens["logp"], ratio, classes),
        band=edges,
        log_y=bool(len(sizes)) and bool(sizes.max() > 10 * sizes.min()),
        note=note,
    )


def _precision(alpha: Column, beta: Column, signs: list[tuple[str, np.ndarray]]) -> Scatter:
    return Scatter(
        "Policy change and precision gap per token",
        "alpha: policy change (nats)",
        "beta: learner - sampler's arithmetic (nats)",
        _classes(alpha, beta, signs),
        note="The learner sees their sum.",
    )


def _crossings(layers: Mapping[str, list[int]]) -> LineChart:
    changed = {module: count / total if total else 0.0 for module, (count, total) in layers.items()}
    return LineChart("Published values changed, by layer", "layer", "fraction of the values", _by_depth(changed))


def _backward(record: Mapping[str, Any]) -> LineChart:
    """Plot the gradient error of an FP8 backward per linear layer."""
    cosine, error = record["layers"].get(record["worst"], (None, None))
    worst = ", ".join(
        f"{name} {number(value)}" for name, value in (("cosine", cosine), ("error", error)) if value is not None
    )
    return LineChart(
        "Gradient of an FP8 backward, by layer",
        "layer",
        "norm of the error over the 16-bit gradient's",
        _by_depth({module: relative for module, (_, relative) in record["layers"].items()}),
        note=f"Worst: {record['worst']} ({worst or 'not finite'}).",
    )


def _routing(record: Mapping[str, Any]) -> list[Block]:
    """Plot router statistics by depth."""
    depth = list(range(len(record["load_max"])))
    loads = [Series(name, depth, record[key]) for name, key in (("largest", "load_max"), ("least", "load_min"))]
    blocks: list[Block] = [
        LineChart(
            "Expert load, by layer",
            "layer with experts",
            "choices, relative to uniform load",
            loads,
            note="1 is a uniform share of the layer's choices.",
        ),
        LineChart(
            "Router entropy, by layer",
            "layer with experts",
            "nats per token",
            [Series("entropy", depth, record["entropy"])],
        ),
    ]
    if record.get("disagreement"):
        blocks.append(
            LineChart(
                "Experts that differ from the sampler's, by layer",
                "layer with experts",
                "fraction of the tokens",
                [Series("learner's own choice", depth, record["disagreement"])],
            )
        )
    return blocks


def _by_depth(values: Mapping[str, float | None]) -> list[Series]:
    """Return a curve over depth per kind of linear layer. values: by module name."""
    kinds: dict[str, list[tuple[int, float | None]]] = {}
    for module, value in values.items():
        match = re.search(r"\.layers\.(\d+)\.(.+)", module)
        depth, kind = (int(match[1]), match[2].rpartition(".")[2]) if match else (0, module)
        kinds.setdefault(kind, []).append((depth, value))
    return [Series(kind, [depth for depth, _ in points], [y for _, y in points]) for kind, points in kinds.items()]


def _deciles_over_steps(records: list[dict[str, Any]]) -> LineChart:
    """Plot the gap by probability at the first recorded step, at the last, and in between."""
    last = len(records) - 1
    chosen = sorted({round(last * i / EARLIER) for i in range(EARLIER + 1)})
    series = [
        Series(
            f"step {records[i]['step']}",
            _middles(records[i]["deciles"]),
            [row["delta_abs_mean"] for row in records[i]["deciles"]],
        )
        for i in chosen
    ]
    return LineChart(
        "Log-prob difference by probability, over steps",
        "probability of the token, sampler",
        "mean |delta| per decile (nats)",
        series,
        log_y=True,
    )


def _with_chart(blocks: list[Block], chart: Chart) -> list[Block]:
    """Insert `chart` after the last chart, so that they share a grid."""
    position = max((i for i, block in enumerate(blocks) if isinstance(block, Chart)), default=-1) + 1
    return [*blocks[:position], chart, *blocks[position:]]


def _examples(rows: list[dict[str, Any]]) -> list[Block]:
    items = []
    for row in rows:
        advantage = row.get("advantage")
        details = [str(row.get("kind", "")), f"tokens {row.get('start')} to {row.get('stop')} of a response"]
        if isinstance(advantage, (int, float)):
            details.append(f"advantage {number(float(advantage))}")
        before, text, after = (str(row.get(key, "")) for key in ("before", "text", "after"))
        items.append(Excerpt(before, text, after, " · ".join(details)))
    return [Excerpts(items, "Repetitive or garbled stretches, longest first")] if items else []


def _by_sign(advantages: Column) -> list[tuple[str, np.ndarray]]:
    named = [("A > 0", advantages > 0), ("A < 0", advantages < 0), ("A = 0", advantages == 0)]
    return [(name, chosen) for name, chosen in named if chosen.any()]


def _classes(x: Column, y: Column, classes: list[tuple[str, np.ndarray]]) -> list[Points]:
    """Return the points of each class. classes: (name, mask)."""
    return [Points(name, x[chosen].tolist(), y[chosen].tolist()) for name, chosen in classes]


def _middles(deciles: list[dict[str, Any]]) -> list[float]:
    return [(row["low"] + row["high"]) / 2 for row in deciles]
