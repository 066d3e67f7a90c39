"""What a step leaves beside its metrics: rollouts, and the tokens behind its diagnostics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from qarl.config import Config
from qarl.diagnostics.crossings import Crossings
from qarl.diagnostics.error_tokens import error_examples
from qarl.diagnostics.record import StepTokens, diagnostics_record
from qarl.rewards import RewardResult
from qarl.training.batch import Batch
from qarl.training.metrics import rollout_rows, rollout_tensors
from qarl.training.probe import Probe
from qarl.training.recorder import Recorder
from qarl.types import Prompt, Rollout

ERROR_EXAMPLES = 8  # stretches of error tokens that a step's diagnostics show


@dataclass
class Trace:
    """None where it is not due. rows, tensors: of rollouts/NNNNNN. The others: of diagnostics/NNNNNN.json."""

    rows: list[dict[str, Any]] | None = None
    tensors: dict[str, Tensor] | None = None
    tokens: StepTokens | None = None
    layers: Crossings | None = None
    examples: list[dict[str, Any]] = field(default_factory=list)

    def write(self, step: int, metrics: dict[str, float], config: Config, recorder: Recorder) -> None:
        """metrics: of the whole step, as in metrics.jsonl."""
        if self.rows is not None:
            recorder.rollouts(step, self.rows, self.tensors)
        if self.tokens is not None:
            record = diagnostics_record(
                step, metrics, self.tokens, self.layers, self.examples, config.diagnostics.tokens, config.train.seed
            )
            recorder.diagnostics(step, record)


def trace_of(
    batch: Batch,
    prompts: list[Prompt],
    rollouts: list[Rollout],
    scores: RewardResult,
    rollouts_due: bool,
    probe: Probe,
    crossed: Crossings,
    decode: Callable[[list[int]], str],
) -> Trace:
    """The trace of a step that was learned from. crossed: changed codes of each module. decode: token ids to text."""
    trace = Trace()
    if rollouts_due:
        trace.rows = rollout_rows(prompts, rollouts, scores, batch)
        trace.tensors = rollout_tensors(batch, scores.total, rollouts[0].version)
    if probe.record:
        trace.tokens = probe.tokens(batch)
        trace.layers = crossed if "crossings" in probe.due else None
        trace.examples = error_examples(batch.responses, batch.logp_sampler, batch.advantages, decode, ERROR_EXAMPLES)
    return trace
