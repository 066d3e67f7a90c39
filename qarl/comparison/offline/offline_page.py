"""comparison.html and plots/*.png of an offline comparison."""

import shlex
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from qarl.comparison.offline.summary import cost_table, label, loss_table, share
from qarl.comparison.offline.targets import REFERENCE
from qarl.comparison.offline.windows import BUNDLED
from qarl.report.blocks import (
    Bar,
    BarChart,
    Block,
    Chart,
    Code,
    Column,
    Facts,
    LineChart,
    Section,
    Series,
    Table,
    Text,
)
from qarl.report.formatting import number
from qarl.report.page import write_page

Member = dict[str, Any]
WORST = 4
ERROR_AXIS = "||W - W_deq|| / ||W||, %"
LOSSES = ("kl", "perplexity")
GAINS = ("size", "decode", "prefill")


def write_page_and_plots(out: Path, result: dict[str, Any]) -> None:
    """Write the page and its charts.

    Args:
        out: Output directory.
        result: Content of comparison.json.

    Raises:
        UserError: A file cannot be written.
    """
    charts = comparison_charts(result["members"])
    settings = result["settings"]
    text = "the bundled text" if settings["text"] == BUNDLED else settings["text"]
    subtitle = f"{settings['predicted_tokens']} tokens of {text}, device {settings['device']}"
    names = {chart.title: f"{name}.png" for name, chart in charts.items()}
    write_page(out / "comparison.html", result["title"], subtitle, page_sections(result, charts), names=names)


def comparison_charts(members: list[Member]) -> dict[str, Chart]:
    """Return charts by file name, those of `weights_*` last. Empty if no scheme was measured."""
    done = [member for member in members if member["state"] == "finished"]
    changed = [member for member in done if member["name"] != REFERENCE]
    charts: dict[str, Chart] = {}
    if changed:
        charts["kl"] = BarChart(
            "Divergence from bf16", "KL(bf16 || scheme), nats per token", [_bar(m, m["kl"]) for m in changed]
        )
        charts["perplexity"] = BarChart("Perplexity increase over bf16", "%", [_increase(m) for m in changed])
    if done:
        spread = "Median, minimum and maximum of the repeats."
        charts["size"] = BarChart("Checkpoint", "MiB", [Bar(label(m), m["checkpoint_bytes"] / 2**20) for m in done])
        charts["decode"] = BarChart(
            "Generation", "new tokens/s", [_rate(m, "decode_tokens_per_s") for m in done], note=spread
        )
        charts["prefill"] = BarChart(
            "Prompts", "prompt tokens/s", [_rate(m, "prefill_tokens_per_s") for m in done], note=spread
        )
    if changed:
        charts["weights"] = LineChart(
            "Weight error of all schemes",
            "layer",
            ERROR_AXIS,
            [_by_layer(m) for m in changed],
            log_y=True,
            note="Median over the Linear layers of a block.",
        )
    for m in changed:
        charts[f"weights_{m['name']}"] = LineChart(f"Weight error, {label(m)}", "layer", ERROR_AXIS, _by_kind(m))
    return charts


def page_sections(result: dict[str, Any], charts: dict[str, Chart]) -> list[Section]:
    members, settings = result["members"], result["settings"]
    failed = [m for m in members if m["state"] == "failed"]
    glance: list[Block] = [loss_table(members), cost_table(members)]
    glance += [Text(f"{m['name']} was not measured: {m['reason']}", "warning") for m in failed]
    glance.append(Text(_how(settings), "note"))
    if settings["text"] == BUNDLED:
        glance.append(
            Text(
                "Measured on the text included in qarl: a few pages of English, school mathematics and Python. Use "
                "--text FILE with a text of your domain for more relevant results.",
                "note",
            )
        )
    sections = [Section("Overview", glance)]
    for title, names in (("Quality loss", LOSSES), ("Savings", GAINS)):
        sections.append(Section(title, [charts[name] for name in names if name in charts]))
    weights: list[Block] = [chart for name, chart in charts.items() if name.startswith("weights")]
    if weights:
        sections.append(Section("Weight error by layer", [*weights, _worst_table(members)]))
    environment = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    facts = [(name.replace("_", " "), str(value)) for name, value in settings.items() if value is not None]
    facts += [("cpu", str(environment["cpu"])), ("packages", versions)]
    sections.append(Section("Method", [Facts(facts), Code(shlex.join(result["command"]))]))
    return sections


def _how(settings: dict[str, Any]) -> str:
    return (
        f"KL and perplexity: {settings['predicted_tokens']} tokens in {settings['windows']} windows of "
        f"{settings['window']}, each read from its start; means with 95 % intervals over the windows. Median and p99 "
        "are over tokens. The ratio to bf16 compares the same tokens, so it is more precise than either perplexity. "
        "Each scheme runs as it is served: its own codes, scales and quantized activations. Speed: "
        f"{settings['batch']} prompts of {settings['prompt_tokens']} tokens, {settings['new_tokens']} new ones each, "
        f"in qarl's native engine (device {settings['device']}, CPU threads: {settings['threads']}); it does not "
        "predict the speed of other engines."
    )


def _bar(member: Member, value: dict[str, float | None]) -> Bar:
    return Bar(label(member), value["mean"], value["low"], value["high"])


def _increase(member: Member) -> Bar:
    ratio = member["perplexity_ratio"]
    return _bar(member, {name: None if x is None else 100 * (x - 1) for name, x in ratio.items()})


def _rate(member: Member, name: str) -> Bar:
    rate = member[name]
    return Bar(label(member), rate["median"], rate["low"], rate["high"])


def _by_layer(member: Member) -> Series:
    """Return the median error per block, in percent."""
    errors: dict[int, list[float]] = defaultdict(list)
    for layer in member["weight_error"]:
        if layer["layer"] is not None and layer["relative"] is not None:
            errors[layer["layer"]].append(100 * layer["relative"])
    return Series(label(member), list(errors), [statistics.median(values) for values in errors.values()])


def _by_kind(member: Member) -> list[Series]:
    """Return one curve per kind of Linear, over the index of the block, in percent."""
    points: dict[str, list[tuple[int, float | None]]] = defaultdict(list)
    for layer in member["weight_error"]:
        if layer["layer"] is not None:
            error = layer["relative"]
            points[layer["kind"]].append((layer["layer"], None if error is None else 100 * error))
    return [
        Series(kind.removesuffix("_proj"), [x for x, _ in curve], [y for _, y in curve])
        for kind, curve in points.items()
    ]


def _worst_table(members: list[Member]) -> Table:
    rows = []
    for member in members:
        if member["state"] == "finished" and member["name"] != REFERENCE:
            worst = sorted(member["weight_error"], key=lambda layer: -(layer["relative"] or 0.0))[:WORST]
            rows += [
                [label(member), x["module"], share(x["relative"]), number(x["sqnr_db"]), number(x["max_abs"])]
                for x in worst
            ]
    columns = [
        Column("scheme"),
        Column("layer"),
        Column("relative error", "right"),
        Column("SQNR, dB", "right", "20 log10(||W|| / ||W - W_deq||)"),
        Column("largest error", "right", "of one weight"),
    ]
    return Table(columns, rows, caption=f"The {WORST} worst layers of each scheme")
