"""The model card's section about the run: settings, metrics of its last steps, evaluations. Does not import torch."""

from pathlib import Path
from typing import Any

from qarl.config import Config, QuantConfig
from qarl.errors import UserError
from qarl.inputs.files import Unreadable
from qarl.inputs.json import read_json_object
from qarl.inputs.schema import Record, checked
from qarl.storage.runs import EVALUATIONS, Interval, RunRecord, TaskScores
from qarl.utils.averages import mean_of

REGIMES = {
    "aligned": "QaRL: the learner's forward runs the sampler's low-bit arithmetic on the same tensors",
    "fake_quant": "QAT: the learner's forward runs on dequantized weights",
    "full_precision": "quantized rollouts: the learner's forward runs on unquantized weights",
}
SUPERVISED = {"sft": "supervised fine-tuning", "distill": "distillation"}  # by objective
EVALUATION_HEAD = ("Task", "Step", "Prompts", "avg@n", "pass@k")  # of the rows of `evaluations_of`


def training_facts(config: Config, metrics: list[dict[str, Any]], step: int) -> list[tuple[str, str]]:
    """Return (label, value) rows about a run up to `step`. metrics: records of metrics.jsonl, oldest first."""
    seen = [record for record in metrics if record["step"] <= step]
    rollout, train, optim = config.rollout, config.train, config.optim
    rewards = ", ".join(Path(function.name).name for function in config.reward.functions)
    source = config.data.source
    regime = REGIMES[config.quant.learner] if config.quant.scheme != "bf16" else "BF16: no weight is quantized"
    advantage = "" if config.objective.name in SUPERVISED else f"advantage {config.objective.advantage}, "
    responses = "from the data" if rollout.engine == "data" else f"sampled at temperature {rollout.temperature:g}"
    facts = [
        ("Steps", f"{step} of {train.steps}"),
        ("Objective", f"{config.objective.name}, {advantage}{config.objective.aggregation}"),
        ("Regime", f"{regime} (scheme {config.quant.label}, learner {config.quant.learner})"),
        ("Prompts", Path(source).name if config.data.kind == "local" else source),
        *([("Rewards", rewards)] if rewards else []),
        (
            "Responses per step",
            f"{config.responses_per_step} ({train.prompts_per_step} prompts, {rollout.n} each), "
            f"{config.minibatch_size} per optimizer step",
        ),
        ("Responses", f"{responses}, at most {rollout.max_response_length} tokens"),
        (
            "Optimizer",
            f"{optim.name}, learning rate {optim.lr:g} ({optim.schedule}), "
            f"weight decay {optim.weight_decay:g}, float32 master weights",
        ),
        ("Seed", str(train.seed)),
    ]
    if config.correction.active:
        facts.append(("Correction", str(config.correction)))
    quarter = max(1, len(seen) // 4)
    first, last = (mean_of(part, "reward/mean") for part in (seen[:quarter], seen[-quarter:]))
    if last is not None:
        at_end = mean_of(seen[-1:], "reward/mean")
        end = "" if at_end is None else f"; {at_end:.3f} in step {seen[-1]['step']}"
        facts.append(("Reward (mean)", f"{_number(first)} in the first quarter, {last:.3f} in the last{end}"))
    mismatch = mean_of(seen[-quarter:], "mismatch/delta_abs_mean")
    if mismatch is not None:
        largest = max((r.get("mismatch/delta_abs_max") or 0.0 for r in seen), default=0.0)
        facts.append(
            (
                "Mismatch",
                f"log-probs of sampler and learner differ by {mismatch:.3g} in the mean of the last "
                f"quarter, and by {largest:.3g} at most for any token of the run",
            )
        )
    return facts


def evaluations_of(record: RunRecord, step: int, quant: QuantConfig) -> list[tuple[str, ...]]:
    """Return one row per evaluated task: of the last evaluation in training up to `step`, and of `qarl eval` at `step`.

    Skips evaluations with another scheme or KV cache dtype than `quant`. Raises UserError if a results file cannot be
    read.
    """
    found = []
    own, wanted = record.config.quant, (quant.scheme, quant.kv_cache_dtype)
    during = [line for line in record.evaluations if line["step"] <= step]
    if during and wanted == (own.scheme, own.kv_cache_dtype):
        found += _evaluations(record.path / EVALUATIONS, during[-1]["step"], during[-1])
    for path in sorted((record.path / "eval").glob("*/results.json")):
        try:
            results = read_json_object(path, nonfinite=True)
        except Unreadable as error:
            raise UserError(f"{error}; remove it, or evaluate again") from error
        if (results.get("step"), results.get("scheme"), results.get("kv_cache_dtype", "auto")) == (step, *wanted):
            found += _evaluations(path, step, results)
    return found


def _evaluations(path: Path, step: int, results: dict[str, Any]) -> list[tuple[str, ...]]:
    try:
        tasks = checked(_Results, results, str(path)).tasks
    except Unreadable as error:
        raise UserError(f"{error}; remove it, or evaluate again") from error
    return [
        (
            task.name,
            str(step),
            str(task.prompts),
            f"avg@{task.samples} {_interval(task.avg)}",
            ", ".join(f"pass@{k} {_interval(value)}" for k, value in task.passes.items()),
        )
        for task in tasks
    ]


class _Task(TaskScores):
    prompts: int
    samples: int


class _Results(Record):
    """The part of results.json that the card shows."""

    tasks: list[_Task]


def _interval(value: Interval | None) -> str:
    return "unknown" if value is None else f"{_number(value.mean)} ({_number(value.low)} to {_number(value.high)})"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"
