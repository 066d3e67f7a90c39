"""The page of one run, RUN/report.html, and its charts as RUN/plots/*.png."""

import json
import shlex
import statistics
from pathlib import Path
from typing import Any

from qarl.errors import UserError
from qarl.inputs.json import flatten
from qarl.report.blocks import (
    Block,
    Code,
    Column,
    Facts,
    Section,
    Table,
    Text,
)
from qarl.report.curve_sections import curve_sections, names_of, other_charts, values_of
from qarl.report.diagnostics import diagnostics_section
from qarl.report.evaluation import evaluation_section
from qarl.report.formatting import gib, number, percent, seconds
from qarl.report.page import GENERATOR, write_page
from qarl.report.samples import samples_section
from qarl.storage.disk import disk_errors, require_kinds, require_output
from qarl.storage.runs import RunRecord, read_run
from qarl.utils.averages import mean_of

WARNINGS = 10  # non-finite metrics listed, one line each


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write the page and plots/*.png next to it, atomically, replacing earlier ones.

    Args:
        run: The run directory.
        out: The page's file. Default: RUN/report.html.

    Returns:
        The page's path.

    Raises:
        UserError: `run` is not a run directory, `out` is a file that qarl did not write, or a file cannot be written.
    """
    record = read_run(run)
    path = run / "report.html" if out is None else out
    check_replaceable(path)
    config = record.config
    subtitle = f"{config.model.path} · {config.quant.label}, {config.quant.learner} learner · {config.objective.name}"
    write_page(path, f"Run {record.path.resolve().name}", subtitle, report_sections(record))
    return path


def check_replaceable(path: Path) -> None:
    """Check that a page at `path` and plots/ next to it would overwrite only earlier output of qarl.

    Raises:
        UserError: They would overwrite something else.
    """
    require_output(path, "--out")
    require_kinds(path.parent, (), ("plots",), "--out")
    if path.exists():
        with disk_errors(path, place="--out"), open(path, "rb") as file:
            if GENERATOR.encode() not in file.read(2000):
                raise UserError(f"--out: {path} exists and was not written by qarl; remove it, or choose another name")


def report_sections(record: RunRecord) -> list[Section]:
    """Return the sections of a run: summary, curves, samples, evaluation, configuration, environment."""
    metrics = record.metrics
    sections = [Section("Summary", [*_warnings(record), _facts(record)])]
    constant: list[tuple[str, float]] = []
    if metrics:
        curves, constant = curve_sections(metrics)
        sections += curves
    sections.insert(2, evaluation_section(record.evaluations))
    sections.insert(-1 if metrics else len(sections), diagnostics_section(record.path))  # before the cost section
    known = {name for name in names_of(metrics) if record.evaluations and name.startswith("eval/")}
    sections.append(Section("Other metrics", [*other_charts(metrics, known)]))
    if constant:
        columns = [Column("metric"), Column("value in every step", "right")]
        table = Table(columns, [[name, number(value)] for name, value in constant])
        sections.append(Section("Metrics that never changed", [table]))
    sections.append(samples_section(record.path))
    sections.append(Section("Configuration", [Code(record.config.to_yaml(), "config.yaml, including defaults")]))
    sections.append(_environment(record.environment))
    return sections


def _warnings(record: RunRecord) -> list[Block]:
    metrics = record.metrics
    steps = record.config.train.steps
    texts: list[str] = []
    if record.state == "running":
        texts.append(f"The run is in progress: {record.step} of {steps} steps. This page is a snapshot.")
    elif record.state == "stopped":
        texts.append(f"The run stopped after {record.step} of {steps} steps; rerun `qarl train` to resume it.")
    elif record.state == "empty":
        texts.append("The run has not finished a step, so there is nothing to plot yet.")
    nulls = {name: [row["step"] for row in metrics if row.get(name, 0) is None] for name in names_of(metrics)}
    infinite = [(name, steps) for name, steps in nulls.items() if steps]
    for name, steps_of in infinite[:WARNINGS]:
        texts.append(f"{name} was not finite in {len(steps_of)} of {len(metrics)} steps (first: step {steps_of[0]}).")
    if len(infinite) > WARNINGS:
        texts.append(f"{len(infinite) - WARNINGS:,} more metrics were not finite in some steps.")
    failed = sum(value or 0 for value in values_of(metrics, "reward/failed"))
    if failed:
        texts.append(f"{failed:.0f} reward scores failed; rewards.log in the run directory says why.")
    skipped = sum(value or 0 for value in values_of(metrics, "policy/skipped_steps"))
    if skipped:
        texts.append(f"{skipped:.0f} optimizer steps were skipped because the gradient was not finite.")
    for name, lines in record.damaged.items():
        texts.append(f"{name}: omitted unreadable lines: {lines} line{'s' * (lines > 1)}.")
    return [Text(text, "warning") for text in texts]


def _facts(record: RunRecord) -> Facts:
    config, metrics, environment = record.config, record.metrics, record.environment
    grouped = config.quant.scheme.startswith("w4") and config.quant.group_size
    items = [
        ("State", record.state),
        ("Steps", f"{record.step:,} of {config.train.steps:,}"),
        ("Scheme", f"{config.quant.scheme}, groups of {config.quant.group_size}" if grouped else config.quant.scheme),
        ("KV cache", "FP8" if config.quant.kv_cache_dtype == "fp8" else config.model.dtype),
        ("Learner", config.quant.learner),
        ("Sampler", config.rollout.sampler_text),
        ("Objective", config.objective.name),
        ("Responses per step", f"{config.responses_per_step}"),
        ("Seed", str(config.train.seed)),
        ("Device", _device(environment)),
    ]
    if metrics:
        quarter = max(1, len(metrics) // 4)
        first, last = (mean_of(part, "reward/mean") for part in (metrics[:quarter], metrics[-quarter:]))
        step_s = [v for v in values_of(metrics[1:] or metrics, "time/step_s") if v is not None]
        delta = [v for v in values_of(metrics, "mismatch/delta_abs_max") if v is not None]
        peak = [v for v in values_of(metrics, "memory/peak_gib") if v is not None]
        if "reward/mean" in names_of(metrics):
            items.append(("Reward, first quarter → last", f"{number(first)} → {number(last)}"))
        items += [
            ("Truncated, last step", percent(values_of(metrics, "response/truncated_frac")[-1])),
            ("Largest |delta|", f"{number(max(delta))} nats" if delta else number(None)),
            ("Time in steps", seconds(sum(v or 0 for v in values_of(metrics, "time/step_s")))),
            ("Median step", seconds(statistics.median(step_s)) if step_s else number(None)),
            ("Peak memory", gib(max(peak) if peak else None)),
        ]
    return Facts(items)


def _environment(environment: dict[str, Any]) -> Section:
    if not environment:
        return Section("Environment", [Text("environment.json is missing or damaged.", "note")])
    packages = environment.get("packages")
    inputs = environment.get("inputs")
    rest = {key: value for key, value in environment.items() if key not in ("packages", "inputs")}
    facts = [(key.replace("_", " "), _plain(key, value)) for key, value in rest.items() if value not in (None, [], "")]
    blocks: list[Block] = [Facts(facts)]
    if isinstance(packages, dict):
        blocks.append(Code("\n".join(f"{name}=={version}" for name, version in packages.items()), "Packages"))
    if isinstance(inputs, dict):
        lines = [f"{name}: {value}" for name, value in flatten(inputs).items()]
        blocks.append(Code("\n".join(lines), "Inputs: digests (SHA-256), and values of the model's configuration"))
    return Section("Environment", blocks)


def _plain(key: str, value: Any) -> str:
    if key == "command" and isinstance(value, list):
        return shlex.join(map(str, value))
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)


def _device(environment: dict[str, Any]) -> str:
    gpus = environment.get("gpus")
    if isinstance(gpus, list) and gpus:
        return f"{len(gpus)} x {gpus[0]}" if len(gpus) > 1 else str(gpus[0])
    return str(environment.get("cpu", "not recorded"))
