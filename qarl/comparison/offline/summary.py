"""Terminal output of an offline comparison: one line per finished member, one table at the end."""

import statistics
from collections.abc import Callable
from typing import Any

from rich.text import Text

from qarl.report.blocks import Column, Table
from qarl.report.formatting import MISSING, bytes_, interval, number, percent
from qarl.terminal.console import print_table, table_console
from qarl.utils.text import visible

LOSS_COLUMNS = [
    Column("scheme"),
    Column("KL, nats", "right", "KL(bf16 || scheme) of the next token over the whole vocabulary, mean over tokens"),
    Column("KL median", "right"),
    Column("KL p99", "right"),
    Column(
        "same top token",
        "right",
        "fraction of tokens for which bf16 and the scheme have the same most probable next token",
    ),
    Column("perplexity", "right"),
    Column("vs bf16", "right", "perplexity over that of bf16, on the same tokens"),
]
COST_COLUMNS = [
    Column("scheme"),
    Column("weight error", "right", "median over Linear layers of ||W - W_deq|| / ||W||"),
    Column("checkpoint", "right", "bytes of the stored tensors"),
    Column("of bf16", "right"),
    Column("prompt tokens/s", "right"),
    Column("new tokens/s", "right"),
]


def loss_table(members: list[dict[str, Any]]) -> Table:
    """Build the table of divergence and perplexity. A scheme without results shows its state instead."""
    return Table(LOSS_COLUMNS, [_row(member, LOSS_COLUMNS, _losses) for member in members])


def cost_table(members: list[dict[str, Any]]) -> Table:
    """Build the table of weight error, size and speed."""
    return Table(COST_COLUMNS, [_row(member, COST_COLUMNS, _costs) for member in members])


def label(member: dict[str, Any]) -> str:
    """Return the scheme's name with its group size, if it has one."""
    return member["name"] + (f" g{member['group_size']}" if member.get("group_size") else "")


def median_error(member: dict[str, Any]) -> float | None:
    """Return the median relative weight error over the layers."""
    errors = [layer["relative"] for layer in member["weight_error"] if layer["relative"] is not None]
    return statistics.median(errors) if errors else None


def share(fraction: float | None) -> str:
    """Format a fraction as a percentage with three significant digits, because errors differ by orders of magnitude."""
    return MISSING if fraction is None else f"{number(100 * fraction)}%"


def _row(member: dict[str, Any], columns: list[Column], cells: Callable[[dict[str, Any]], list[str]]) -> list[str]:
    if member["state"] == "finished":
        return [label(member), *cells(member)]
    return [member["name"], member["state"], *[MISSING] * (len(columns) - 2)]


def _losses(m: dict[str, Any]) -> list[str]:
    return [
        _interval(m["kl"]),
        number(m["kl"]["median"]),
        number(m["kl"]["p99"]),
        percent(m["top1_agreement"]["mean"]),
        _interval(m["perplexity"]),
        _interval(m["perplexity_ratio"]),
    ]


def _interval(value: dict[str, float | None]) -> str:
    if value["low"] == value["high"]:  # bf16 against itself
        return number(value["mean"])
    return interval(value["mean"], value["low"], value["high"])


def _costs(m: dict[str, Any]) -> list[str]:
    return [
        share(median_error(m)),
        bytes_(m["checkpoint_bytes"]),
        percent(m["checkpoint_ratio"]),
        number(m["prefill_tokens_per_s"]["median"]),
        number(m["decode_tokens_per_s"]["median"]),
    ]


def member_line(m: dict[str, Any]) -> str:
    return (
        f"{label(m)}: KL {number(m['kl']['mean'])} nats, perplexity {number(m['perplexity']['mean'])}, checkpoint "
        f"{bytes_(m['checkpoint_bytes'])}, decode {number(m['decode_tokens_per_s']['median'])} tokens/s "
        f"({m['seconds']:.0f} s)"
    )


def print_results(members: list[dict[str, Any]]) -> None:
    """Print the tables with schemes as columns, because there are few and terminals are narrow, then reasons."""
    rows = [
        [column.name, *(row[place].replace(" [", "\n[") for row in source.rows)]
        for source in (loss_table(members), cost_table(members))
        for place, column in enumerate(source.columns[1:], 1)
    ]
    columns = [Column(""), *(Column(label(member), "right") for member in members)]
    console = table_console()
    print_table(Table(columns, rows, "Means with 95 % intervals"), console)
    for member in members:
        if member["state"] == "failed":
            console.print(Text(visible(f"{member['name']}: {member['reason']}")))
