"""Data classes: prompts and rollouts, and the results of `qarl.api`. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class GivenResponse:
    """A response from the data, for supervised training and for distillation without sampling.

    Attributes:
        token_ids: Tokens after the prompt, including the end-of-sequence token.
        written: Whether the assistant wrote each token; None: all. The loss covers only these. Others are later
            messages of the user, or markup of the chat template.
        complete: False if the response was cut to `rollout.max_response_length` or the model's context.
    """

    token_ids: list[int]
    written: list[bool] | None = None
    complete: bool = True


@dataclass(frozen=True)
class Prompt:
    """One row of the data, ready for the sampler.

    Attributes:
        id: Position of the row in the source; stable across shuffling and resuming.
        token_ids: The prompt as the sampler sees it, including the chat template.
        text: The same, as text.
        columns: The row's other columns (`answer`, ...), passed to the rewards.
        response: The response from the data; None if responses are sampled.
    """

    id: int
    token_ids: list[int]
    text: str
    columns: dict[str, Any] = field(default_factory=dict)
    response: GivenResponse | None = None


@dataclass(frozen=True)
class Rollout:
    """One sampled response.

    Attributes:
        prompt_id: The `Prompt.id` that it answers.
        sample: Index of the response to that prompt. If a step has a prompt twice, the second n responses are numbered
            n to 2n - 1.
        token_ids: Response tokens, including the stop token.
        logprobs: The sampler's natural log-prob per token, after temperature and truncation, as float32 values.
        finish_reason: `stop` (a stop token or string) or `length`.
        version: Version of the policy that sampled its last token.
        seed: Seed of its random stream.
        text: The response without special tokens and without the stop string.
        routing: Experts per token, (prompt + response - 1, L, k), as `qarl.policy.routes.stored` encodes them; None if
            `SamplingParams` did not request them. The last token predicts nothing and has no entry.
        written: Whether the policy wrote each token; None: all. Others, such as the output of a tool, are context: they
            have no log-prob (`logprobs` may hold any number), and count in no loss and in no statistic of tokens.
        versions: Version of the policy that sampled each token; None: all `version`.
    """

    prompt_id: int
    sample: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    version: int
    seed: int
    text: str
    routing: Tensor | None = field(default=None, compare=False)
    written: list[bool] | None = None
    versions: list[int] | None = None

    @property
    def token_versions(self) -> list[int]:
        """Version of the policy that sampled each token."""
        return self.versions or [self.version] * len(self.token_ids)


def mixed_versions(versions: list[int]) -> list[int] | None:
    """Return `Rollout.versions` of tokens that were sampled by these versions."""
    return versions if len(set(versions)) > 1 else None


@dataclass(frozen=True)
class TrainResult:
    """A training run.

    Attributes:
        run_dir: Directory with everything that the run wrote.
        metrics: The lines of metrics.jsonl: one dict per step, oldest first, including steps before a resume.
        evaluations: The lines of evaluations.jsonl.
        checkpoint: Directory of the newest checkpoint; None if there is none.
        exit_code: 0 if the run is at its last step; 129, 130 or 143 if SIGHUP, Ctrl-C or SIGTERM stopped it after a
            checkpoint was saved. The same call resumes it.
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
        """One metric over the steps that have it, such as `reward/mean`; empty if no step has it."""
        return [row[name] for row in self.metrics if row.get(name) is not None]


@dataclass(frozen=True)
class ExportResult:
    """A checkpoint written for serving.

    Attributes:
        path: Its directory.
        files: Size in bytes by file name.
        tensor_bytes: Size of its tensors in bytes.
        bf16_bytes: Size of the same model in bfloat16, in bytes.
        digest: SHA-256 of the manifest of the published tensors.
        same_as_run: Whether the run recorded the same digest.
        fault: Why transformers 5 cannot load it; None if it can.
        verification: Contents of verification.json; None if verification was not requested.
        pushed: URL of the commit on the hub; None if it was not pushed.
    """

    path: Path
    files: dict[str, int] = field(repr=False)
    tensor_bytes: int
    bf16_bytes: int
    digest: str
    same_as_run: bool
    fault: str | None = None
    verification: dict[str, Any] | None = field(default=None, repr=False)
    pushed: str | None = None

    @property
    def verified(self) -> bool:
        """Whether it was verified and every reader that could run agrees with the run."""
        return self.verification is not None and bool(self.verification["ok"])


@dataclass(frozen=True)
class EvaluationResult:
    """An evaluation.

    Attributes:
        path: Directory with results.json and completions.jsonl.
        results: Contents of results.json. Each value in it is {"mean", "low", "high"}, with a 95 % interval.
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

    Attributes:
        path: Directory with comparison.json, comparison.html and plots.
        comparison: Contents of comparison.json.
        exit_code: 0; 1 if a member failed or was refused (its `reason` says why); 128 + N if signal N interrupted it.
    """

    path: Path
    comparison: dict[str, Any] = field(repr=False)
    exit_code: int

    @property
    def members(self) -> dict[str, dict[str, Any]]:
        """Entries of `members` in comparison.json (metrics and state), by name of the run, variant or scheme."""
        return {member["name"]: member for member in self.comparison["members"]}


@dataclass(frozen=True)
class Completion:
    """One completion of a prompt.

    Attributes:
        prompt: The prompt as it was given.
        text: The completion.
        token_ids: Tokens of the completion.
        logprobs: Natural log-probs of these tokens, after temperature and truncation (greedy: at temperature 1).
        finish_reason: `stop`, or `length` if the completion was cut off.
        prompt_index, sample: Index of the prompt, and of the completion among those of the prompt, from 0.
        prompt_token_ids: Tokens of the prompt as the policy saw it, including the chat template.
    """

    prompt: str
    text: str
    token_ids: list[int] = field(repr=False)
    logprobs: list[float] = field(repr=False)
    finish_reason: FinishReason
    prompt_index: int
    sample: int
    prompt_token_ids: list[int] = field(repr=False)


@dataclass(frozen=True)
class Difference:
    """The first token that differs in a check of exactness, and the operation at which the two forwards diverge.

    Attributes:
        round, prompt, sample: Indices of the response, from 0, in sampling order.
        token, position: Index of the token in the response and in the whole sequence, from 0.
        token_id: The token.
        sampler, learner: Its log-probs in nats.
        place: One line with what the trace found; None if it found nothing, see `note`.
        layer: Index of the layer; None outside of the layers.
        operation: One of `qarl.exactness.first_difference.OPERATIONS`.
        operation_position: Position of the token at which the operation differs first.
        values: Number of values in the operation's result for that token.
        values_differing, values_largest: How many of them differ, and the largest difference.
        note: Why the trace found no operation; empty if it found one.
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
    """Whether the log-probs of sampled tokens are the learner's, bit for bit.

    Attributes:
        target, scheme, kv_cache_dtype, engine, device: What was checked, with which engine, on which device.
        versions: Versions of torch, triton and vllm.
        tokens, responses: How many were sampled and compared.
        longest: Maximum tokens of a prompt and its response.
        preemptions: How often a sequence lost its KV pages; None if the engine does not report it.
        differing: Tokens whose log-prob differs.
        largest: Largest difference in nats.
        drawn_per_s, recomputed_per_s: Tokens per second that the sampler sampled and the learner recomputed.
        first: The first difference; None if no token differs.
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
        """Whether no token differs."""
        return self.differing == 0
