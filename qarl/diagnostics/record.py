"""Build the record of a step, RUN/diagnostics/NNNNNN.json: metrics, and a sample of tokens for plots."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from qarl.diagnostics.backward import Modules, worst_module
from qarl.diagnostics.crossings import Crossings, by_layer
from qarl.diagnostics.mismatch import gap_tables, probability_deciles
from qarl.diagnostics.precision import clipped_tokens
from qarl.inputs.json import strict
from qarl.objectives.segments import Segments
from qarl.storage.diagnostics_record import FORMAT_VERSION
from qarl.utils.expert_names import of_experts

if TYPE_CHECKING:
    from qarl.objectives.base import Band


@dataclass(frozen=True)
class StepTokens:
    """The T tokens of R responses that a step trained on, on the CPU, packed.

    Attributes:
        logp_sampler: (T,) float32, as the sampler reported.
        logp_old: (T,) float32, learner at the rollout's weights.
        logp: (T,) float32, the learner's last training forward over the token.
        logp_shadow: (T,) in the sampler's arithmetic at the weights of that forward; None if it did not run.
        log_ratio: (T,) log ratio that the objective clips.
        weights: (T,) correction weights; None without a correction.
        advantages: (R,).
        segments: The response of each token.
        band: Ratios with a gradient; None if unbounded.
    """

    logp_sampler: Tensor
    logp_old: Tensor
    logp: Tensor
    logp_shadow: Tensor | None
    log_ratio: Tensor
    weights: Tensor | None
    advantages: Tensor
    segments: Segments
    band: Band | None


def diagnostics_record(
    step: int,
    metrics: dict[str, float],
    tokens: StepTokens,
    layers: Crossings | None,
    examples: list[dict[str, Any]],
    max_tokens: int,
    seed: int,
    backward: Modules | None = None,
    routing: dict[str, list[float]] | None = None,
) -> dict[str, Any]:
    """Build the record of a step from JSON types only; infinities and NaN become null.

    Experts are combined: code flips of a projection are summed over the experts of a layer (`...mlp.experts.up_proj`),
    and of the FP8 backward errors only the worst expert's is kept.

    "tokens" has the columns of `StepTokens` and three masks. They are null without a band, and the last two also
    without a shadow:

        outside              no gradient in the band under the objective's ratio
        phantom              no gradient because of precision alone (`precision/phantom_lost_frac`)
        phantom_either_side  outside the bounds because of precision alone, for either sign of A
                             (`precision/phantom_frac`)

    Args:
        step: The training step.
        metrics: Metrics of the step, as in metrics.jsonl.
        tokens: The tokens of the step.
        layers: Code flips per module; None if not measured.
        examples: Result of `error_examples`.
        max_tokens: Maximum number of tokens kept. The sample depends on (seed, step) only and keeps the order. Deciles
            and tables are computed over all tokens.
        seed: Seed of the sample.
        backward: Gradient error of an FP8 backward per module; the record also names the worst module.
        routing: Routing statistics of the layers with experts, in order, see `RoutingTotals.layers`.

    Returns:
        The record in the format of `qarl.storage.diagnostics_record`.
    """
    count = tokens.logp.numel()
    chosen: range | list[int] = range(count)
    if count > max_tokens:
        chosen = sorted(random.Random(f"diagnostics-{seed}-{step}").sample(range(count), max_tokens))
    outside = phantom = either = None
    band, segments = tokens.band, tokens.segments
    if band is not None:
        outside = band.outside(tokens.log_ratio, tokens.advantages, segments)
        if tokens.logp_shadow is not None:
            common = (tokens.logp_shadow, tokens.logp_sampler, tokens.advantages, segments, band)
            counts = clipped_tokens(tokens.log_ratio, *common)
            phantom, either = counts.phantom_lost, counts.phantom
    columns: dict[str, Tensor | None] = {
        "logp_sampler": tokens.logp_sampler,
        "logp_old": tokens.logp_old,
        "logp": tokens.logp,
        "logp_shadow": tokens.logp_shadow,
        "log_ratio": tokens.log_ratio,
        "weight": tokens.weights,
        "advantage": segments.expand(tokens.advantages),
        "outside": outside,
        "phantom": phantom,
        "phantom_either_side": either,
    }
    record = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "metrics": metrics,
        "band": None
        if band is None
        else {"level": band.level, "high": band.high, "low": band.low, "neg_high": band.neg_high},
        "tokens": {name: None if x is None else x[list(chosen)].tolist() for name, x in columns.items()},
        "token_count": count,
        "deciles": probability_deciles(tokens.logp_old, tokens.logp_sampler),
        **gap_tables(tokens.logp_old, tokens.logp_sampler, segments),
        "layers": None if layers is None else by_layer(layers),
        "backward": _backward(backward) if backward else None,
        "routing": routing,
        "error_examples": examples,
    }
    return strict(record)


def _backward(modules: Modules) -> dict[str, Any]:
    together: dict[str, Modules] = {}
    for name, pair in modules.items():
        together.setdefault(of_experts(name) or name, {})[name] = pair
    worst = [worst_module(some) for some in together.values()]
    return {"worst": worst_module(modules), "layers": {name: modules[name] for name in worst}}
