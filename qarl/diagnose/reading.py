"""Interpret the metrics of a step: findings that point to known failure modes of the papers. Imports no torch.

Thresholds come from the runs in the papers, with one model and one task each. They show where to look and prove
nothing. If a paper gives no number, the threshold is ours and marked as such.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from qarl.report.formatting import number, percent

Level = Literal["problem", "watch", "fine"]
Metrics = Mapping[str, float | None]
Known = Mapping[str, float]  # metrics that are numbers
Reading = tuple[Level, str]

# TRL precision study: 12.5 to 18 % in the run that did not learn; in the run that did, 1.0 % were clipped (10.3).
PHANTOM_PROBLEM, PHANTOM_WATCH = 0.03, 0.005
# TRL study: 1.3 % in the run that stalled, 7.9 % in the one that learned (7.7, 10.4). Ours: half of that.
EFFICIENCY_FINE = 0.04
# TRL study: the cosine of gradient and clean gradient stays above 0.95 without clipping (7.5).
COSINE_WATCH, COSINE_PROBLEM = 0.95, 0.8
# TRL study: |beta| was 0.076 in the run that did not learn (6.2). Ours: two thirds of that.
DELTA_MEAN_WATCH = 0.05
# VeXact, figure 1: maxima near 1.0 with a small mean, in runs that later collapsed. Ours: half of that.
DELTA_MAX_WATCH = 0.5
# Ours: the ratio of a token varies by 100 %, and by 10 %, which is half of a usual clip range.
CHI2_PROBLEM, ESS_PROBLEM, CHI2_WATCH = 1.0, 0.5, 0.01
# VeXact, figure 4: K3 grows in bypass mode before the reward falls. Ours: the factor and the floor.
K3_GROWTH, K3_FLOOR = 3.0, 1e-3
# VeXact, figure 5: contributions of one sign are distorted more than the other. Ours: a quarter of their size.
SKEW_WATCH, SKEW_FLOOR = 0.25, 1e-4
# DVP, proposition 4.2 and appendix: the gap in the tail. Ours: a tenth of a nat, half of a usual clip range.
TAIL_WATCH = 0.1
# QaRL, section 3.2: error tokens rare in positive responses, prevalent in negative ones. Ours: both numbers.
ERROR_FRAC, ERROR_SIGN = 0.01, 2.0
# Ours.
OUTSIDE_WATCH = 0.01
WEIGHT_ESS_WATCH, DROPPED_WATCH, CLIPPED_WATCH = 0.5, 0.5, 0.3

CONTRIBUTIONS = tuple(
    f"policy/contribution_{name}" for name in ("train_pos", "train_neg", "rollout_pos", "rollout_neg")
)


@dataclass(frozen=True)
class Finding:
    """One interpretation of the metrics.

    Attributes:
        level: `problem`, a known failure mode; `watch`, close to one; `fine`.
        text: One or two sentences.
        evidence: The metrics that support it.
    """

    level: Level
    text: str
    evidence: dict[str, float] = field(default_factory=dict)


def read(metrics: Metrics) -> list[Finding]:
    """Return the findings for a step's metrics, problems first. Missing, NaN and None metrics are skipped.

    In addition to the metrics of metrics.jsonl it reads:

        mismatch/inside_abs_mean, inside_abs_max  |delta| of tokens with finite log-probs; default: of all tokens
        mismatch/tail_abs_mean                    the same for tokens of probability below 0.1
        mismatch/head_abs_mean                    the same for tokens of probability 0.9 or more
        history/k3_first, history/k3_last         mean mismatch/k3 over the first and last quarter of the run
        weights/ess_frac, weights/zero_frac       of the correction weights over the tokens
    """
    known = {name: value for name, value in metrics.items() if value is not None and value == value}
    found = [
        Finding(level, text, {name: known[name] for name in evidence if name in known})
        for check, evidence in _CHECKS
        for level, text in check(known)
    ]
    order = {"problem": 0, "watch": 1, "fine": 2}
    found.sort(key=lambda finding: order[finding.level])
    if found and all(finding.level == "fine" for finding in found):
        found.insert(0, Finding("fine", "Nothing measured here points to a known failure mode."))
    return found


def _outside(m: Known) -> Iterable[Reading]:
    outside = m.get("mismatch/outside_frac", 0.0)
    if "mismatch/delta_abs_max" in m and outside > 0.0:
        yield (
            "watch" if outside > OUTSIDE_WATCH else "fine",
            f"{percent(outside)} of the tokens are outside the truncated distribution of the learner or of the "
            "sampler. They have ratio 0 and no gradient. mismatch/delta_* counts them as 20 nats; the findings here "
            "leave them out.",
        )


def _mismatch(m: Known) -> Iterable[Reading]:
    if "mismatch/delta_abs_max" not in m:
        return
    mean = m.get("mismatch/inside_abs_mean", m.get("mismatch/delta_abs_mean", 0.0))
    largest = m.get("mismatch/inside_abs_max", m["mismatch/delta_abs_max"])
    sizes = f"mean |delta| is {number(mean)} nats, the maximum {number(largest)}"
    if m["mismatch/delta_abs_max"] == 0.0:
        yield "fine", "The log-probs of sampler and learner agree bit for bit at every sampled token."
    elif m.get("mismatch/chi2_token", 0.0) >= CHI2_PROBLEM or m.get("mismatch/ess_frac", 1.0) < ESS_PROBLEM:
        yield (
            "problem",
            f"Sampler and learner are different policies: {sizes}, and the effective sample size with importance "
            f"weights is {percent(m.get('mismatch/ess_frac'))} of the tokens. quant.learner: aligned removes the "
            "mismatch; a correction (correction.preset) only bounds it.",
        )
    elif largest >= DELTA_MAX_WATCH:
        yield (
            "watch",
            f"A few tokens differ strongly: {sizes}. VeXact saw maxima near 1.0 with a small mean in runs that later "
            "collapsed. Truncation per token (correction.preset: tis) bounds their weight.",
        )
    elif mean >= DELTA_MEAN_WATCH or m.get("mismatch/chi2_token", 0.0) >= CHI2_WATCH:
        yield (
            "watch",
            f"Sampler and learner differ at many tokens: {sizes}. This alone uses up much of a usual clip range of "
            "0.2. quant.learner: aligned removes the mismatch, a correction bounds it.",
        )
    else:
        yield "fine", f"Sampler and learner differ little: {sizes}."


def _growth(m: Known) -> Iterable[Reading]:
    first, last = m.get("history/k3_first"), m.get("history/k3_last")
    if first is None or last is None or last < K3_FLOOR or last <= K3_GROWTH * first:
        return
    yield (
        "watch",
        f"K3 between learner and sampler grew from {number(first)} to {number(last)} nats per token over the run. "
        "VeXact saw it grow before the reward fell, with the ratio against the sampler. With the ratio against the "
        "learner's recomputed log-probs it stayed flat while training failed, so a flat K3 proves nothing.",
    )


def _skew(m: Known) -> Iterable[Reading]:
    if any(name not in m for name in CONTRIBUTIONS):
        return
    train_pos, train_neg, rollout_pos, rollout_neg = (m[name] for name in CONTRIBUTIONS)
    if train_pos == train_neg == 0.0:  # the policy has not moved
        return
    shift_pos, shift_neg = train_pos - rollout_pos, train_neg - rollout_neg
    size = abs(rollout_pos) + abs(rollout_neg)
    # A shift of equal size for both signs, in opposite directions, cancels in the sum.
    skew = abs(shift_pos + shift_neg)
    if skew > max(SKEW_WATCH * size, SKEW_FLOOR):
        yield (
            "watch",
            f"The recomputed ratio shifts the two signs unevenly: C(r) = -(r - 1) A is {number(train_pos)} for A > 0 "
            f"and {number(train_neg)} for A < 0 with the learner's recomputed log-probs, but {number(rollout_pos)} and "
            f"{number(rollout_neg)} with the sampler's. VeXact reports such a skew as the first sign of instability. "
            "objective.ratio: rollout (correction.preset: bypass) uses the ratio against the sampler.",
        )


def _tail(m: Known) -> Iterable[Reading]:
    tail, head = m.get("mismatch/tail_abs_mean"), m.get("mismatch/head_abs_mean")
    if tail is None or head is None or tail < TAIL_WATCH or tail <= head:
        return
    yield (
        "watch",
        f"The gap is in the tail: {number(tail)} nats for tokens of probability below 0.1, {number(head)} for tokens "
        "of 0.9 or more. Rounding causes this pattern (DVP bounds it by 2 eps (1 - p)). objective.dvp_rho removes the "
        "least probable tokens from both distributions.",
    )


def _precision(m: Known) -> Iterable[Reading]:
    if "precision/beta_abs_max" not in m:
        return
    phantom, clipped = m.get("precision/phantom_frac"), m.get("precision/clipped_frac", 0.0)
    lost = ""
    if (share := m.get("precision/phantom_lost_frac")) is not None:
        lost = f" {percent(share)} of all tokens lose their gradient this way, although the policy has not moved there."
    if m["precision/beta_abs_max"] == 0.0:
        yield "fine", "The learner computes exactly as the sampler: beta is 0 at every token."
    elif phantom is None:
        yield (
            "fine",
            "The objective clips nothing, so no token loses its gradient because of precision. Precision changes the "
            f"log-probs by {number(m.get('precision/beta_abs_mean'))} nats on average.",
        )
    elif phantom >= PHANTOM_PROBLEM:
        yield (
            "problem",
            f"Phantom clipping: {percent(phantom)} of the tokens are outside the clip bounds because of precision "
            f"alone, {percent(clipped)} because the policy moved.{lost} The TRL study saw 12.5% to 18% in a run that "
            "did not learn. quant.learner: aligned, objective.ratio: shadow or one, or objective.loss: no_clip helps.",
        )
    elif phantom >= PHANTOM_WATCH:
        yield (
            "watch",
            f"{percent(phantom)} of the tokens are outside the clip bounds because of precision alone, "
            f"{percent(clipped)} because the policy moved.{lost}",
        )
    else:
        yield (
            "fine",
            f"Precision alone moves {percent(phantom)} of the tokens outside the clip bounds; the policy's movement "
            f"alone (alpha) moves {percent(clipped)}.",
        )
    snr = m.get("precision/snr")
    if snr is not None and snr < 1.0:
        yield (
            "watch",
            f"The ratio is mostly precision: mean |alpha| is {number(m.get('precision/alpha_abs_mean'))} nats, mean "
            f"|beta| {number(m.get('precision/beta_abs_mean'))}. This is usual early in a run, when the policy has "
            "hardly moved. It does harm only through phantom clipping.",
        )
    if clipped > CLIPPED_WATCH:
        yield (
            "watch",
            f"The policy's movement alone (alpha) moves {percent(clipped)} of the tokens outside the band; lower "
            "optim.lr, take fewer optimizer steps per batch, or widen the band.",
        )


def _gradients(m: Known) -> Iterable[Reading]:
    cosine = m.get("gradients/cos_total")
    if cosine is None:
        return
    if cosine >= COSINE_WATCH:
        yield (
            "fine",
            f"The gradient has the direction it would have without the precision gap (cosine {number(cosine)}, "
            "without clipping).",
        )
        return
    ratio, score = m.get("gradients/ratio_rel", 0.0), m.get("gradients/score_rel", 0.0)
    source = "through the ratio" if ratio > score else "through the score, which no choice of ratio fixes"
    yield (
        "problem" if cosine < COSINE_PROBLEM else "watch",
        f"The precision gap changes the direction of the gradient: its cosine with the clean gradient is "
        f"{number(cosine)} (above 0.95 in the TRL study). Most of the effect comes {source}.",
    )


def _clipped_gradient(m: Known) -> Iterable[Reading]:
    cosine, clip, whole = (m.get(f"gradients/{name}") for name in ("cos_clipped", "clip_rel", "clipped_rel"))
    if cosine is None or clip is None or whole is None or cosine >= COSINE_WATCH or clip < whole / 2:
        return
    yield (
        "problem" if cosine < COSINE_PROBLEM else "watch",
        f"Phantom clipping changes the direction of the gradient: with clipping, its cosine with the clean gradient is "
        f"{number(cosine)} (0.55 in the failing run of the TRL study). Tokens clipped or not by precision alone "
        f"change it by {number(clip)} of its norm. objective.loss: no_clip or detach, or objective.ratio: shadow keeps "
        "these tokens.",
    )


def _still(m: Known) -> Iterable[Reading]:
    if m.get("deployed/delta_abs_mean") == 0.0:
        why = "The update may be too small to cross any rounding boundary; raise optim.lr."
        if m.get("weights/zero_frac") == 1.0:
            why = "The correction left no token to learn from."
        yield "watch", f"The step did not change the served policy: every log-prob is the same as before. {why}"


def _deployed(m: Known) -> Iterable[Reading]:
    efficiency = m.get("deployed/efficiency")
    if efficiency is None:
        return
    what = f"{percent(efficiency)} of the served policy's movement was along the advantages"
    paper = "the TRL study reports 7.9% for a run that learned and 1.3% for a run that stalled, over 100 steps"
    if efficiency >= EFFICIENCY_FINE:
        yield "fine", f"The step improved the served policy: {what} ({paper})."
    else:
        yield (
            "watch",
            f"The step hardly improved the served policy: {what} ({paper}). One step is noisy: measure several "
            "(diagnostics.deployed_every).",
        )


def _error_tokens(m: Known) -> Iterable[Reading]:
    share = m.get("error_tokens/frac")
    if share is None:
        return
    positive, negative = m.get("error_tokens/positive_frac", 0.0), m.get("error_tokens/negative_frac", 0.0)
    if share < ERROR_FRAC:
        yield "fine", f"{percent(share)} of the tokens are in repetitive or garbled stretches."
    elif negative > ERROR_SIGN * positive:
        yield (
            "problem",
            f"Error tokens: {percent(share)} of the tokens are in repetitive or garbled stretches, {percent(negative)} "
            f"where A < 0 and {percent(positive)} where A > 0. QaRL found that such tokens drive the ratios of "
            "responses with A < 0 to extremes. objective.name: tbpo drops a response that leaves its band.",
        )
    else:
        yield (
            "watch",
            f"{percent(share)} of the tokens are in repetitive or garbled stretches, {percent(negative)} where A < 0 "
            f"and {percent(positive)} where A > 0. This is not QaRL's pattern: the model itself is uncertain or "
            "repetitive, or the task requires such text.",
        )


def _weights(m: Known) -> Iterable[Reading]:
    ess, zero = m.get("weights/ess_frac"), m.get("weights/zero_frac")
    if zero is not None and zero > DROPPED_WATCH:
        yield (
            "watch",
            f"The correction drops {percent(zero)} of the tokens; the rest may be too little to learn from. Widen its "
            "bounds, or remove the mismatch at its source.",
        )
    elif ess is not None and ess < WEIGHT_ESS_WATCH:
        yield (
            "watch",
            f"The correction's weights are far from 1: the effective sample size is {percent(ess)} of the number of "
            "tokens.",
        )
    elif ess is not None:
        yield "fine", f"The correction keeps an effective sample size of {percent(ess)} of the tokens."


def _named(prefix: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}/{name}" for name in names)


# Checks in the order of their findings, each with the metrics that support what it says.
_CHECKS: tuple[tuple[Callable[[Known], Iterable[Reading]], tuple[str, ...]], ...] = (
    (_outside, _named("mismatch", "outside_frac", "delta_abs_mean", "delta_abs_max")),
    (_mismatch, _named("mismatch", "delta_abs_mean", "delta_abs_max", "chi2_token", "ess_frac")),
    (
        _precision,
        _named(
            "precision",
            *("alpha_abs_mean", "beta_abs_mean", "snr", "clipped_frac", "phantom_frac", "phantom_lost_frac"),
            "argmax_flip_frac",
        ),
    ),
    (_gradients, _named("gradients", "cos_total", "total_rel", "ratio_rel", "score_rel")),
    (_clipped_gradient, _named("gradients", "cos_clipped", "clip_rel", "clipped_rel")),
    (_still, ("deployed/delta_abs_mean", "quant/codes_changed_frac", "weights/zero_frac")),
    (_deployed, _named("deployed", "improvement", "delta_abs_mean", "efficiency")),
    (_tail, _named("mismatch", "tail_abs_mean", "head_abs_mean")),
    (_skew, CONTRIBUTIONS),
    (_growth, _named("history", "k3_first", "k3_last")),
    (_weights, _named("weights", "mean", "max", "ess_frac", "zero_frac")),
    (
        _error_tokens,
        _named(
            "error_tokens",
            *("frac", "repetitive_frac", "garbled_frac", "positive_frac", "negative_frac", "responses_frac"),
        ),
    ),
)
