#!/usr/bin/env python3
"""Summarize the runs of configs/evidence: abilities of the starting policy, missing runs, records, figures, tables.

    python tools/evidence.py ladder runs/evidence_sft               # share of right answers per family and level
    python tools/evidence.py missing --size 175x512 --seeds 0 1 2   # pairs of arm and seed without a record
    python tools/evidence.py record runs/evidence                   # benchmarks/results/evidence/*.json, one per run
    python tools/evidence.py figures                                # docs/results.md, its pictures, further tables

Arm, learning rate, size (steps x responses) and seed identify a record. A `+` in the name of an arm marks runs that
started from another policy; no figure shows them. `record --steps N` uses the first N steps of each run; the run need
not have finished. `figures` averages over seeds. It plots the records of the first --size; each further --size gets one
table. Intervals are 95 %. The interval of an accuracy is Wilson's over prompts (qarl.evaluation.estimators). Two arms
are compared on the seeds that both have, with a paired bootstrap over the test prompts, which are the same for all
arms. With three or more seeds, Student's t over seeds replaces either interval where it is wider.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import count

from qarl.comparison.intervals import mean_interval
from qarl.comparison.study import load_study
from qarl.errors import UserError
from qarl.evaluation.estimators import mean_over_prompts
from qarl.report.formatting import number
from qarl.storage.runs import RunRecord, find_runs, read_run

Row = dict[str, Any]
Key = tuple[str, float]  # arm, learning rate

ROOT = Path(__file__).parents[1]
STUDY = ROOT / "configs/evidence/arms.yaml"
RECORDS = Path("benchmarks/results/evidence")
CURVES = {  # metric -> (how a table reduces it over the steps, head of its column)
    "reward/mean": ("last quarter", "reward, last quarter"),
    "mismatch/delta_abs_mean": ("mean", "mismatch, mean abs(delta)"),
    "policy/rollout_k3": ("mean", "KL of the sampler, k3"),
    "policy/kl_k3": ("mean", "KL of the updates, k3"),
    "policy/kl_ref": ("last quarter", "KL from the start"),
    "policy/clip_frac": ("mean", "clipped or dropped"),
    "policy/entropy": ("last quarter", "entropy, last quarter"),
    "policy/grad_norm": ("mean", "gradient norm"),
    "mismatch/routing_disagreement": ("mean", "other experts"),
    "error_tokens/frac": ("last quarter", "error tokens, last quarter"),
    "quant/codes_changed_frac": ("mean", "codes changed per step"),
    "response/length_mean": ("last quarter", "tokens, last quarter"),
    "time/step_s": ("median", "seconds per step"),
}
SECTIONS = ("model", "quant", "rollout", "objective", "correction", "optim", "train")  # of the configuration, kept
FURTHER = ("reward/mean", "mismatch/delta_abs_mean", "error_tokens/frac", "time/step_s")  # tables of further sizes
RESAMPLES = 10_000
TRAILING = 5  # steps per point of the training reward
START, FINAL = slice(0, 1), slice(-1, None)  # the first and the last of a record's evaluations
BEGIN, END = "<!-- made by tools/evidence.py figures -->", "<!-- end -->"


def read_lines(path: Path) -> list[Row]:
    """Return the objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def sized_rows(record: RunRecord, path: Path) -> dict[str, list[Row]]:
    """Return the completions of an evaluation per task name, each with the family and level of its prompt.

    Args:
        record: The run, whose configuration names the files of the tasks.
        path: evaluations/NNNNNN.jsonl, or completions.jsonl of `qarl eval`.
    """
    tasks = {str(task.name): read_lines(Path(task.dataset.source)) for task in record.config.evaluation.tasks}
    found: dict[str, list[Row]] = defaultdict(list)
    for row in read_lines(path):
        asked = tasks[row["task"]][row["prompt_id"] :][:1]  # prompt_id counts the lines of the file from 0
        if not asked or asked[0]["prompt"] not in row["prompt"]:
            raise UserError(f"{path}: prompt {row['prompt_id']} changed since; restore the data file of the evaluation")
        found[row["task"]].append(row | {name: asked[0][name] for name in ("family", "level")})
    return found


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def show_ladder(options: argparse.Namespace) -> None:
    """Print the share of right answers and of truncated responses by family and level."""
    record = read_run(options.run)
    files = [*options.run.glob("evaluations/*.jsonl"), *options.run.glob("eval/*/completions.jsonl")]
    if not files:
        raise UserError(f"{options.run}: no evaluation; run qarl eval {options.run}")
    for path in sorted(files):
        for name, rows in sized_rows(record, path).items():
            print(f"{path.relative_to(options.run)}, task {name}")
            for family, level in sorted({(row["family"], row["level"]) for row in rows}):
                own = [row for row in rows if (row["family"], row["level"]) == (family, level)]
                right = statistics.fmean(row["correct"] for row in own)
                cut = statistics.fmean(row["finish_reason"] == "length" for row in own)
                print(f"  {family:15} level {level}  {right:4.0%} right of {len(own)}, {cut:.0%} truncated")


def make_record(record: RunRecord, steps: int | None = None) -> Row:
    """Return what the figures need of one run. `correct`: number of right samples per test prompt, in order.

    Args:
        record: The run. Its directory is named after the arm, with an optional suffix -seedN.
        steps: Number of steps to use, from the first; None: all.

    Raises:
        UserError: `steps` with a learning rate that depends on `train.steps`, or without an evaluation after them.
    """
    known = {
        "arm": re.sub(r"-seed\d+$", "", record.path.name),
        "lr": record.config.optim.lr,
        "steps": steps or record.config.train.steps,
        "responses": record.config.responses_per_step,
        "seed": record.config.train.seed,
    }
    if steps and record.config.optim.schedule != "constant":
        raise UserError(f"{record.path}: --steps: optim.schedule depends on train.steps; use runs with a constant rate")
    found = [evaluation for evaluation in record.evaluations if evaluation["step"] <= known["steps"]]
    if steps and not (found and found[-1]["step"] == steps):
        after = ", ".join(str(evaluation["step"]) for evaluation in record.evaluations)
        raise UserError(f"{record.path}: --steps: no evaluation after step {steps}; choose one of {after or 'none'}")
    environment = {k: v for k, v in record.environment.items() if k not in ("command", "host", "seed", "inputs")}
    config = record.config.model_dump(mode="json", exclude_none=True)
    metrics = [row for row in record.metrics if row["step"] <= known["steps"]]
    curves = {name: [_short(row.get(name)) for row in metrics] for name in CURVES}
    evaluations = []
    for evaluation in found:
        rows = sized_rows(record, record.path / "evaluations" / f"{evaluation['step']:06d}.jsonl")["test"]
        right: dict[int, int] = defaultdict(int)
        for row in rows:
            right[row["prompt_id"]] += row["correct"]
        families = {row["prompt_id"]: row["family"] for row in rows}
        counts = [right[prompt] for prompt in sorted(right)]
        cut = statistics.fmean(row["finish_reason"] == "length" for row in rows)
        evaluations.append({"step": evaluation["step"], "correct": counts, "truncated_frac": _short(cut)})
    return {
        **known,
        "samples": record.config.evaluation.samples,
        "environment": environment,
        "config": {name: config.get(name) for name in SECTIONS},
        "families": [families[prompt] for prompt in sorted(families)] if found else [],
        "evaluations": evaluations,
        "curves": {name: values for name, values in curves.items() if any(v is not None for v in values)},
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def write_records(options: argparse.Namespace) -> None:
    folder = options.root / RECORDS
    folder.mkdir(parents=True, exist_ok=True)
    for run in (run for root in options.roots for run in find_runs(root)[0]):
        if run.step < options.steps if options.steps else run.state != "finished":
            print(f"{run.path}: {run.state} at step {run.step} of {run.config.train.steps}; no record")
            continue
        made = make_record(run, options.steps)
        lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in made.items())
        path = folder / "{arm}-{steps}x{responses}-lr{lr:g}-seed{seed}.json".format(**made)
        path.write_text("{\n" + lines + "\n}\n")
        print(path)


def read_records(folder: Path, size: str | None = None) -> list[Row]:
    """Return the records of one size (steps x responses, such as 60x256) of the common starting policy.

    Raises:
        UserError: There are records of several sizes and `size` is None, or there are no records.
    """
    by_size: dict[str, list[Row]] = defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        if "+" not in record["arm"]:
            by_size[f"{record['steps']}x{record['responses']}"].append(record)
    if size is None and len(by_size) > 1:
        raise UserError(f"{folder}: records of several sizes; choose one with --size: {', '.join(sorted(by_size))}")
    if not (records := by_size[size or next(iter(by_size), "")]):
        raise UserError(f"{folder}: no records; make them with tools/evidence.py record")
    return records


def show_missing(options: argparse.Namespace) -> None:
    """Print the seeds without a record per arm and learning rate: the rates of its records, or else the study's."""
    seeds = defaultdict(set)
    for record in read_records(options.root / RECORDS, options.size):
        seeds[record["arm"], record["lr"]].add(record["seed"])
    study = load_study(str(STUDY))
    for arm in study.variants:
        for rate in sorted(lr for name, lr in seeds if name == arm) or [study.config["optim"]["lr"]]:
            if left := [str(seed) for seed in options.seeds if seed not in seeds[arm, rate]]:
                print(f"{arm:20}  lr {rate:g}  seeds {', '.join(left)}")


def prompt_means(records: Sequence[Row], part: slice) -> list[float]:
    """Return the share of right answers per test prompt over samples, seeds and the evaluations of `part`."""
    columns = zip(*(found["correct"] for record in records for found in record["evaluations"][part]), strict=True)
    return [sum(column) / len(column) / records[0]["samples"] for column in columns]


def accuracy(records: Sequence[Row], part: slice) -> tuple[float, float, float]:
    """Return the mean accuracy over prompts and seeds, and the low and high end of its interval; see `widened`."""
    found = mean_over_prompts(prompt_means(records, part), records[0]["samples"] * len(records))
    low, high = widened(found.low, found.high, [statistics.fmean(prompt_means([record], part)) for record in records])
    return found.mean, max(0.0, low), min(1.0, high)


def widened(low: float, high: float, seeds: Sequence[float]) -> tuple[float, float]:
    """Return an interval over prompts, each end replaced by that of Student's t over seeds (three or more) if wider."""
    if len(seeds) >= 3:  # Student's t alone would have width 0 where all seeds agree, as before the first step
        _, *ends = mean_interval(seeds)
        low, high = min(low, *ends[:1]), max(high, *ends[1:])
    return low, high


def difference(records: Sequence[Row], others: Sequence[Row], part: slice) -> tuple[float, float, float] | None:
    """Return the accuracy of `records` minus that of `others`, and its interval, on the seeds that both have.

    The interval is a paired bootstrap over prompts; see `widened`. part: Which evaluations. Return None if the two have
    no seed in common.
    """
    import numpy as np

    by_seed = [{record["seed"]: record for record in found} for found in (records, others)]
    seeds = sorted(by_seed[0].keys() & by_seed[1].keys())
    if not seeds:
        return None
    ours, theirs = (np.array([prompt_means([found[seed]], part) for seed in seeds]) for found in by_seed)
    gaps = ours - theirs  # one row per seed, one column per prompt
    means = gaps.mean(0)
    draws = np.random.default_rng(0).integers(len(means), size=(RESAMPLES, len(means)))
    low, high = (float(end) for end in np.quantile(means[draws].mean(1), (0.025, 0.975)))
    return float(means.mean()), *widened(low, high, [float(gap) for gap in gaps.mean(1)])


def steps_mean(records: Sequence[Row], metric: str) -> list[float | None]:
    """Return the mean over seeds per step; None for a step without the metric."""
    columns = zip(*(record["curves"].get(metric, []) for record in records), strict=False)
    return [statistics.fmean(column) if None not in column else None for column in columns]


def step_number(records: Sequence[Row], metric: str) -> float | None:
    """Return a metric reduced to one number over the steps, as `CURVES` says."""
    values = [value for value in steps_mean(records, metric) if value is not None]
    if not values:
        return None
    how = CURVES[metric][0]
    if how == "median":
        return statistics.median(values[1:] or values)  # the first step compiles
    return statistics.fmean(values[-max(1, len(values) // 4) :] if how == "last quarter" else values)


def percent(found: tuple[float, float, float] | None, sign: str = "") -> str:
    if found is None:
        return ""
    mean, low, high = (format(100 * value, f"{sign}.1f") for value in found)
    return f"{mean} [{low}, {high}]"


def results(groups: dict[Key, list[Row]], reference: list[Row] | None, metrics: Sequence[str] = ()) -> str:
    """Return a Markdown table: accuracies, their differences from `reference`, and the given metrics of CURVES.

    "Second half" is the mean over the evaluations after more than half of the steps; it has less noise than the end.
    """
    rows = []
    for (arm, lr), records in groups.items():
        late = slice(-sum(2 * one["step"] > records[0]["steps"] for one in records[0]["evaluations"]), None)
        found = [percent(accuracy(records, part)) for part in (START, FINAL, late)]
        other = reference if reference and reference is not records else []
        found += [percent(difference(records, other, part), "+") for part in (FINAL, late)]
        seeds = ", ".join(str(record["seed"]) for record in records)
        rows.append([arm, f"{lr:g}", seeds, *found, *(number(step_number(records, metric)) for metric in metrics)])
    against = f"against {reference[0]['arm']}" if reference else "against"
    heads = ["arm", "lr", "seeds", "start, %", "end, %", "second half, %", f"end, {against}", f"second half, {against}"]
    return markdown([*heads, *(CURVES[metric][1] for metric in metrics)], rows)


def tables(groups: dict[Key, list[Row]]) -> list[str]:
    """Return Markdown tables of accuracy per family and of the step metrics. groups: Records per arm and rate."""
    families, measured = [], []
    for (arm, lr), records in groups.items():
        values, names = prompt_means(records, FINAL), records[0]["families"]
        means = {name: statistics.fmean(v for v, n in zip(values, names, strict=True) if n == name) for name in names}
        families.append([arm, f"{lr:g}", *(f"{100 * means[name]:.1f}" for name in sorted(means))])
        measured.append([arm, f"{lr:g}", *(number(step_number(records, metric)) for metric in CURVES)])
    by_family = ["arm", "lr", *(f"{name}, %" for name in sorted(set(next(iter(groups.values()))[0]["families"])))]
    used = [i for i in range(2, 2 + len(CURVES)) if any(row[i] != number(None) for row in measured)]
    heads = ["arm", "lr", *(head for _, head in CURVES.values())]
    by_steps = markdown([heads[i] for i in (0, 1, *used)], [[row[i] for i in (0, 1, *used)] for row in measured])
    return [markdown(by_family, families), by_steps]


def labelled(groups: dict[Key, list[Row]]) -> dict[str, list[Row]]:
    """Return the records of each curve per label: the arm, and its learning rate if the arm has several."""
    rates = Counter(arm for arm, _ in groups)
    return {arm if rates[arm] == 1 else f"{arm}, lr {lr:g}": records for (arm, lr), records in groups.items()}


def charts(shown: dict[str, list[Row]]) -> dict[str, Any]:
    """Return the chart per name of its picture, with one curve per entry of `shown` (label -> records)."""
    from qarl.report.blocks import Bar, BarChart, LineChart, Series

    def trailing(values: Sequence[float | None]) -> list[float | None]:
        parts = [[v for v in values[max(0, i - TRAILING + 1) : i + 1] if v is not None] for i in range(len(values))]
        return [statistics.fmean(part) if part else None for part in parts]

    served, reward, mismatch, errors, bars = [], [], [], [], []
    for arm, records in shown.items():
        steps = list(range(1, records[0]["steps"] + 1))
        found = [accuracy(records, slice(i, i + 1)) for i in range(len(records[0]["evaluations"]))]
        at = [evaluation["step"] for evaluation in records[0]["evaluations"]]
        served.append(Series(arm, at, *([100 * f[i] for f in found] for i in range(3))))
        reward.append(Series(arm, steps, trailing(steps_mean(records, "reward/mean"))))
        errors.append(Series(arm, steps, trailing(steps_mean(records, "error_tokens/frac"))))
        mismatch.append(Series(arm, steps, steps_mean(records, "mismatch/delta_abs_mean")))
        bars.append(Bar(arm, *(100 * value for value in found[-1])))
    kept = f"Mean of {TRAILING} steps"
    return {
        "reward": LineChart("Training reward", "step", kept.lower(), reward),
        "errors": LineChart("Error tokens", "step", f"fraction, {kept.lower()}", errors),
        "accuracy": LineChart("Test tasks answered", "step", "%, 95 % intervals", served),
        "final": BarChart("After the last step", "test tasks answered, %, 95 % intervals", bars),
        "mismatch": LineChart("Mismatch of sampler and learner", "step", "mean |delta|, nats", mismatch, log_y=True),
    }


def grouped(records: Sequence[Row], order: Sequence[str]) -> dict[Key, list[Row]]:
    """Return the records per arm and learning rate, in the study's order."""
    groups: dict[Key, list[Row]] = defaultdict(list)
    for record in records:
        groups[record["arm"], record["lr"]].append(record)
    place = {arm: index for index, arm in enumerate(order)}
    return {key: groups[key] for key in sorted(groups, key=lambda key: (place.get(key[0], len(place)), key))}


def write_figures(options: argparse.Namespace) -> None:
    from qarl.report.charts import png
    from qarl.report.drawing import has_data

    order = list(load_study(str(STUDY)).variants)

    def read(size: str | None) -> tuple[str, dict[Key, list[Row]], list[Row] | None]:
        """Return the setting, the records, and the reference: most seeds first, then the best reward."""
        records = read_records(options.root / RECORDS, size)
        groups = grouped(records, order)
        others = [found for (arm, _), found in groups.items() if arm in options.reference]
        best = max(others, key=lambda found: (len(found), step_number(found, "reward/mean") or 0.0), default=None)
        return setting(records), groups, best

    first, *further = options.size or [None]
    about, groups, reference = read(first)
    pictures = options.root / "docs/images"
    pictures.mkdir(parents=True, exist_ok=True)
    lines = [about, ""]
    for name, chart in charts(labelled(groups)).items():
        if has_data(chart):
            (pictures / f"evidence_{name}.png").write_bytes(png(chart))
            lines += [f"![{chart.title}](images/evidence_{name}.png)", ""]
    write_block(options.root / "docs/results.md", [*lines, results(groups, reference), ""])
    lines = []
    for table in (about, *tables(groups)):
        lines += [table, ""]
    for size in further:
        about, groups, reference = read(size)
        lines += [about, "", results(groups, reference, FURTHER), ""]
    write_block(options.root / "benchmarks/reproductions.md", lines)


def write_block(page: Path, lines: Sequence[str]) -> None:
    """Replace the lines of a page from `BEGIN` to `END`, which an earlier call wrote."""
    before, begin, rest = page.read_text().partition(BEGIN)
    if not begin:
        raise UserError(f"{page}: has no line {BEGIN}; add it, and below it {END}")
    page.write_text(before + "\n".join([BEGIN, "", *lines]) + END + rest.partition(END)[2])
    print(page)


def setting(records: Sequence[Row]) -> str:
    """Return one paragraph: model, sizes, device and versions of the records."""
    first, found = records[0], [record["environment"] for record in records]
    devices = sorted({", ".join(one.get("gpus") or [one.get("cpu", "CPU")]) for one in found})
    versions = [f"{name} {version}" for name, version in found[0]["packages"].items() if name in ("torch", "triton")]
    revisions = sorted({str(one.get("git_revision"))[:8] for one in found})
    length = first["config"]["rollout"]["max_response_length"]
    return (
        f"{first['steps']} steps of {first['responses']} responses of up to {length} tokens, from the policy of "
        f"`configs/evidence/sft.yaml`, with the arms of `configs/evidence/arms.yaml`. {len(first['families'])} test "
        f"prompts, samples per prompt: {first['samples']}. {'; '.join(devices)}; {', '.join(versions)}; revision "
        f"{', '.join(revisions)}. Intervals are 95 %, over prompts, or over three or more seeds if that is wider. "
        "Records: `benchmarks/results/evidence/`."
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout of records and pages; default: this one")
    commands = parser.add_subparsers(required=True)
    ladder = commands.add_parser("ladder", help="print the share of right answers per family and level")
    ladder.add_argument("run", type=Path)
    missing = commands.add_parser("missing", help="print the pairs of arm and seed without a record")
    missing.add_argument("--size", metavar="STEPSxRESPONSES", help="needed if there are records of several sizes")
    missing.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default 0 1 2")
    record = commands.add_parser("record", help="write the records of finished runs")
    record.add_argument("--steps", type=count, help="use only these first steps; default: all, of finished runs")
    record.add_argument("roots", type=Path, nargs="+", help="directories with runs")
    figures = commands.add_parser("figures", help="write docs/results.md, its pictures and further tables")
    sizes = "needed if there are records of several sizes; the first gets the figures, further ones a table each"
    figures.add_argument("--size", metavar="STEPSxRESPONSES", nargs="+", help=sizes)
    figures.add_argument("--reference", nargs="+", default=["qarl-tbpo", "experts-qarl"], help="arms to compare with")
    ladder.set_defaults(action=show_ladder)
    missing.set_defaults(action=show_missing)
    record.set_defaults(action=write_records)
    figures.set_defaults(action=write_figures)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    try:
        options.action(options)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
