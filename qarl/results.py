"""What the functions of `qarl.api` return: paths and numbers. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TrainResult:
    """A training run.

    run_dir: everything it wrote. metrics: one dict a step, as the lines of metrics.jsonl, oldest first; the steps of
    earlier starts are among them. evaluations: the lines of evaluations.jsonl. checkpoint: the newest one, None where
    there is none. exit_code: 0, the run is at its last step; 130 or 143, a signal stopped it, with a checkpoint, and
    the same call goes on from there.
    """

    run_dir: Path
    metrics: list[dict[str, Any]] = field(repr=False)
    evaluations: list[dict[str, Any]] = field(repr=False)
    checkpoint: Path | None
    exit_code: int

    @property
    def finished(self) -> bool:
        """Whether the run is at its last step."""
        return self.exit_code == 0

    @property
    def step(self) -> int:
        """The last step in the metrics, 0 before the first."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    def series(self, name: str) -> list[float]:
        """One metric over the steps that have it, such as `reward/mean`; empty where none has."""
        return [row[name] for row in self.metrics if row.get(name) is not None]


@dataclass(frozen=True)
class ExportResult:
    """A checkpoint written for serving.

    path: its directory. files: name -> bytes. tensor_bytes: of its tensors; bf16_bytes: of the same model in bfloat16.
    digest: SHA-256 over the published tensors' manifest. same_as_run: whether that is the digest which the run
    recorded. verification: what verification.json holds; None where verification was not asked for.
    """

    path: Path
    files: dict[str, int] = field(repr=False)
    tensor_bytes: int
    bf16_bytes: int
    digest: str
    same_as_run: bool
    verification: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def verified(self) -> bool:
        """Whether it was verified and every reader that could run agrees with the run."""
        return self.verification is not None and bool(self.verification["ok"])


@dataclass(frozen=True)
class EvaluationResult:
    """An evaluation.

    path: its directory, with results.json and completions.jsonl. results: what results.json holds; each value in it is
    {"mean", "low", "high"}, with a 95 % interval.
    """

    path: Path
    results: dict[str, Any] = field(repr=False)

    @property
    def avg(self) -> float:
        """Mean over the tasks of avg@samples, in [0, 1]."""
        return float(self.results["overall"]["avg"]["mean"])

    @property
    def pass_at(self) -> dict[int, float]:
        """k -> mean over the tasks of the unbiased estimate of pass@k, in [0, 1]."""
        return {int(k): float(estimate["mean"]) for k, estimate in self.results["overall"]["pass"].items()}


@dataclass(frozen=True)
class ComparisonResult:
    """A comparison.

    path: its directory, with comparison.json, comparison.html and plots. comparison: what comparison.json holds.
    exit_code: 0; 1 where a member failed or was refused, and its `reason` says why; 128 + a signal that interrupted.
    """

    path: Path
    comparison: dict[str, Any] = field(repr=False)
    exit_code: int

    @property
    def members(self) -> dict[str, dict[str, Any]]:
        """Name of a run, variant or scheme -> its numbers and its state."""
        return {member["name"]: member for member in self.comparison["members"]}


@dataclass(frozen=True)
class Completion:
    """One completion of a prompt.

    prompt: as it was given. text: the completion. token_ids, logprobs: of the completion's tokens; natural logs, after
    temperature and top-p (greedy: at temperature 1). finish_reason: `stop`, or `length` where it was cut.
    """

    prompt: str
    text: str
    token_ids: list[int] = field(repr=False)
    logprobs: list[float] = field(repr=False)
    finish_reason: str


@dataclass(frozen=True)
class Difference:
    """The first token of a check of exactness that differs, and where the two forwards part.

    round, prompt, sample: from 0, as drawn. token: its place in the response, position: in the whole sequence, both
    from 0. sampler, learner: its log-probs. place: what the trace found, as a line; None where it found nothing, and
    `note` says why. layer: None outside of the layers. operation: of `qarl.policy.trace.OPERATIONS`.
    operation_position: of the token whose row it was; it is no later than the one that `token` was predicted from.
    values, values_differing, values_largest: of the operation's result for that token, drawn once more: how many there
    are, how many differ, by how much at most.
    """

    round: int
    prompt: int
    sample: int
    token: int
    position: int
    token_id: int
    sampler: float
    learner: float
    place: str | None = None
    layer: int | None = None
    operation: str | None = None
    operation_position: int | None = None
    values: int | None = None
    values_differing: int | None = None
    values_largest: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Exactness:
    """Whether the log-probs of drawn tokens are the learner's, bit for bit.

    target, scheme, kv_cache_dtype, engine, device: what was checked, where. versions: of torch, triton, vllm. tokens,
    responses: drawn and compared. longest: tokens of a prompt and its response. preemptions: how often a sequence lost
    its KV pages; None where the engine does not say. differing: tokens whose log-prob differs; largest: by how much, in
    nats. drawn_per_s, recomputed_per_s: tokens a second. first: None where nothing differs.
    """

    target: str
    scheme: str
    kv_cache_dtype: str
    engine: str
    device: str
    versions: dict[str, str]
    tokens: int = 0
    responses: int = 0
    longest: int = 0
    preemptions: int | None = None
    differing: int = 0
    largest: float = 0.0
    drawn_per_s: float = 0.0
    recomputed_per_s: float = 0.0
    first: Difference | None = None

    @property
    def exact(self) -> bool:
        return self.differing == 0
