"""What the numbers say, in words: which failure mode of the papers they point to, if any. Imports no torch.

Thresholds come from the runs that the papers show, one model and one task each, so they say where to look and prove
nothing. Where a paper gives no number the threshold is ours and is called so here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from qarl.report.formatting import number, percent

Level = Literal["problem", "watch", "fine"]
Metrics = Mapping[str, float | None]

# TRL precision study: 12.5 to 18 % in the run that did not learn, 1.0 % clipped in all in the one that did (10.3).
PHANTOM_PROBLEM, PHANTOM_WATCH = 0.03, 0.005
# The same: 1.3 % in the run that stalled, 7.9 % in the one that learned (7.7, 10.4). Ours: half of that.
EFFICIENCY_FINE = 0.04
# The same: gradient and clean gradient stay above 0.95 without clipping (7.5).
COSINE_WATCH, COSINE_PROBLEM = 0.95, 0.8
# TRL study: |beta| was 0.076 in the run that did not learn (6.2). Ours: two thirds of that.
DELTA_MEAN_WATCH = 0.05
# VeXact, figure 1: extremes near 1.0 beside a small mean, in runs that later collapsed. Ours: half of that.
DELTA_MAX_WATCH = 0.5
# Ours: the ratio of a token varies by 100 %, and by 10 %, half a usual clip range.
CHI2_PROBLEM, ESS_PROBLEM, CHI2_WATCH = 1.0, 0.5, 0.01
# VeXact, figure 4: K3 grows in bypass mode before the reward falls. Ours: the factor and the floor.
K3_GROWTH, K3_FLOOR = 3.0, 1e-3
# VeXact, figure 5: contributions of one sign distorted more than of the other. Ours: a quarter of their size.
SKEW_WATCH, SKEW_FLOOR = 0.25, 1e-4
# DVP, proposition 4.2 and appendix: the tail's gap. Ours: a tenth of a nat is half of a usual clip range.
TAIL_WATCH = 0.1
# QaRL, section 3.2: error tokens rare in positive responses, prevalent in negative ones. Ours: both numbers.
ERROR_FRAC, ERROR_SIGN = 0.01, 2.0
# Ours.
OUTSIDE_WATCH = 0.01
WEIGHT_ESS_WATCH, DROPPED_WATCH, CLIPPED_WATCH = 0.5, 0.5, 0.3


@dataclass(frozen=True)
class Finding:
    """What some of the numbers say, in a sentence or two.

    level: `problem`, the numbers of a known failure mode; `watch`, on the way there; `fine`. evidence: the metrics it
    rests on.
    """

    level: Level
    text: str
    evidence: dict[str, float] = field(default_factory=dict)


def read(metrics: Metrics) -> list[Finding]:
    """Findings from a step's metrics, problems first; what was not measured is not judged, NaN and None included.

    Beside the names of metrics.jsonl: mismatch/inside_abs_mean and inside_abs_max (|delta| where both log-probs are
    finite; without them, of all tokens), mismatch/tail_abs_mean and head_abs_mean (of those of probability below 0.1,
    and of 0.9 and more), history/k3_first and history/k3_last (mean mismatch/k3 of the run's
    first and last quarter), weights/ess_frac and weights/zero_frac (of the correction weights over the tokens).
    """
    known = {name: value for name, value in metrics.items() if value is not None and value == value}
    found = [finding for check in _CHECKS for finding in check(known)]
    order = {"problem": 0, "watch": 1, "fine": 2}
    found.sort(key=lambda finding: order[finding.level])
    if found and all(finding.level == "fine" for finding in found):
        found.insert(0, Finding("fine", "Nothing measured here points to a known failure mode."))
    return found


def _mismatch(m: Mapping[str, float]) -> Iterable[Finding]:
    if "mismatch/delta_abs_max" not in m:
        return
    names = ("mismatch/delta_abs_mean", "mismatch/delta_abs_max", "mismatch/chi2_token", "mismatch/ess_frac")
    evidence = _evidence(m, *names)
    mean = m.get("mismatch/inside_abs_mean", m.get("mismatch/delta_abs_mean", 0.0))
    largest = m.get("mismatch/inside_abs_max", m["mismatch/delta_abs_max"])
    sizes = f"|delta| is {number(mean)} nats in the mean and {number(largest)} at most"
    outside = m.get("mismatch/outside_frac", 0.0)
    if outside > 0.0:
        yield Finding(
            "watch" if outside > OUTSIDE_WATCH else "fine",
            f"{percent(outside)} of the tokens are outside the learner's truncated distribution, or the sampler's. "
            "They have ratio 0 and give no gradient; mismatch/delta_* counts them as 20 nats, this reading does not.",
            _evidence(m, "mismatch/outside_frac", "mismatch/delta_abs_mean", "mismatch/delta_abs_max"),
        )
    if m["mismatch/delta_abs_max"] == 0.0:
        yield Finding("fine", "Sampler and learner gave every sampled token the same log-prob, bit for bit.", evidence)
    elif m.get("mismatch/chi2_token", 0.0) >= CHI2_PROBLEM or m.get("mismatch/ess_frac", 1.0) < ESS_PROBLEM:
        yield Finding(
            "problem",
            f"The sampler is another policy than the learner: {sizes}, and weighting by the ratio leaves "
            f"{percent(m.get('mismatch/ess_frac'))} of the tokens' worth. quant.learner: aligned removes it; a "
            "correction (correction.preset) only bounds it.",
            evidence,
        )
    elif largest >= DELTA_MAX_WATCH:
        yield Finding(
            "watch",
            f"A few tokens differ much: {sizes}. VeXact saw extremes near 1.0 beside a small mean in runs that "
            "later collapsed; a token-level truncation (correction.preset: tis) bounds what they weigh.",
            evidence,
        )
    elif mean >= DELTA_MEAN_WATCH or m.get("mismatch/chi2_token", 0.0) >= CHI2_WATCH:
        yield Finding(
            "watch",
            f"Sampler and learner differ at many tokens: {sizes}. A usual clip range of 0.2 is soon used up by "
            "that alone; quant.learner: aligned removes it, a correction bounds it.",
            evidence,
        )
    else:
        yield Finding("fine", f"Sampler and learner differ little: {sizes}.", evidence)


def _growth(m: Mapping[str, float]) -> Iterable[Finding]:
    first, last = m.get("history/k3_first"), m.get("history/k3_last")
    if first is None or last is None or last < K3_FLOOR or last <= K3_GROWTH * first:
        return
    yield Finding(
        "watch",
        f"K3 between learner and sampler grew from {number(first)} to {number(last)} nats a token over the run. VeXact "
        "saw it grow before the reward fell (with the ratio against the sampler; against the learner's own recomputed "
        "log-probs it stayed flat while training failed, so a flat K3 is no proof).",
        _evidence(m, "history/k3_first", "history/k3_last"),
    )


def _skew(m: Mapping[str, float]) -> Iterable[Finding]:
    names = [f"policy/contribution_{against}_{sign}" for against in ("train", "rollout") for sign in ("pos", "neg")]
    if any(name not in m for name in names):
        return
    train_pos, train_neg, rollout_pos, rollout_neg = (m[name] for name in names)
    if train_pos == train_neg == 0.0:  # the policy has not moved: there is nothing that could be uneven
        return
    shift_pos, shift_neg = train_pos - rollout_pos, train_neg - rollout_neg
    size = abs(rollout_pos) + abs(rollout_neg)
    # A shift that pushes both signs alike in size, one up and one down, cancels in the sum.
    skew = abs(shift_pos + shift_neg)
    if skew > max(SKEW_WATCH * size, SKEW_FLOOR):
        yield Finding(
            "watch",
            f"The recomputed ratio pushes the two signs unevenly: C(r) = -(r - 1) A is {number(train_pos)} for A > 0 "
            f"and {number(train_neg)} for A < 0 against the learner's own log-probs, {number(rollout_pos)} and "
            f"{number(rollout_neg)} against the sampler's. VeXact takes such a skew for the first sign of trouble; "
            "objective.ratio: rollout (correction.preset: bypass) works with the latter.",
            _evidence(m, *names),
        )


def _tail(m: Mapping[str, float]) -> Iterable[Finding]:
    tail, head = m.get("mismatch/tail_abs_mean"), m.get("mismatch/head_abs_mean")
    if tail is None or head is None or tail < TAIL_WATCH or tail <= head:
        return
    yield Finding(
        "watch",
        f"The gap is in the tail: {number(tail)} nats for tokens of probability below 0.1, {number(head)} from 0.9 on. "
        "Rounding does that (DVP bounds it by 2 eps (1 - p)); objective.dvp_rho takes the least probable tokens out of "
        "both sides.",
        _evidence(m, "mismatch/tail_abs_mean", "mismatch/head_abs_mean"),
    )


def _precision(m: Mapping[str, float]) -> Iterable[Finding]:
    if "precision/beta_abs_max" not in m:
        return
    names = (
        "alpha_abs_mean",
        "beta_abs_mean",
        "snr",
        "clipped_frac",
        "phantom_frac",
        "phantom_lost_frac",
        "argmax_flip_frac",
    )
    evidence = _evidence(m, *(f"precision/{name}" for name in names))
    phantom, clipped = m.get("precision/phantom_frac"), m.get("precision/clipped_frac", 0.0)
    lost = ""
    if (share := m.get("precision/phantom_lost_frac")) is not None:
        lost = f" {percent(share)} of all tokens lose their gradient by it, although they have not changed."
    if m["precision/beta_abs_max"] == 0.0:
        yield Finding("fine", "The learner computes as the sampler does: beta is 0 at every token.", evidence)
    elif phantom is None:
        yield Finding(
            "fine",
            "The objective clips nothing, so precision takes no token's gradient; it moves the "
            f"log-probs by {number(m.get('precision/beta_abs_mean'))} nats in the mean.",
            evidence,
        )
    elif phantom >= PHANTOM_PROBLEM:
        yield Finding(
            "problem",
            f"Phantom clipping: {percent(phantom)} of the tokens are outside the clip bounds because of precision "
            f"alone, {percent(clipped)} because the policy moved.{lost} The TRL study saw 12.5% to 18% in a run that "
            "did not learn. quant.learner: aligned, objective.ratio: shadow or one, or objective.loss: no_clip helps.",
            evidence,
        )
    elif phantom >= PHANTOM_WATCH:
        yield Finding(
            "watch",
            f"{percent(phantom)} of the tokens are outside the clip bounds by precision alone, "
            f"{percent(clipped)} because the policy moved.{lost}",
            evidence,
        )
    else:
        yield Finding(
            "fine",
            f"Precision alone takes {percent(phantom)} of the tokens out of the clip bounds, the "
            f"policy's movement alone (alpha) {percent(clipped)}.",
            evidence,
        )
    snr = m.get("precision/snr")
    if snr is not None and snr < 1.0:
        yield Finding(
            "watch",
            f"The ratio is mostly precision: mean |alpha| is {number(m.get('precision/alpha_abs_mean'))} nats, mean "
            f"|beta| {number(m.get('precision/beta_abs_mean'))}. Early in a run that is usual, since the policy has "
            "hardly moved; what it costs is phantom clipping, if there is any.",
            evidence,
        )
    if clipped > CLIPPED_WATCH:
        yield Finding(
            "watch",
            f"The policy's movement alone (alpha) takes {percent(clipped)} of the tokens out of the "
            "band; lower optim.lr, take fewer optimizer steps a batch, or widen the band.",
            evidence,
        )


def _gradients(m: Mapping[str, float]) -> Iterable[Finding]:
    cosine = m.get("gradients/cos_total")
    if cosine is None:
        return
    evidence = _evidence(m, *(f"gradients/{name}" for name in ("cos_total", "total_rel", "ratio_rel", "score_rel")))
    if cosine >= COSINE_WATCH:
        yield Finding(
            "fine",
            f"The gradient points where it would without the precision gap (cosine {number(cosine)}, "
            "clipping left aside).",
            evidence,
        )
        return
    ratio, score = m.get("gradients/ratio_rel", 0.0), m.get("gradients/score_rel", 0.0)
    source = "through the ratio" if ratio > score else "through the score, which no choice of ratio mends"
    yield Finding(
        "problem" if cosine < COSINE_PROBLEM else "watch",
        f"The precision gap turns the gradient: its cosine with the clean one is {number(cosine)}, above 0.95 in the "
        f"TRL study; most of it comes {source}.",
        evidence,
    )


def _clipped_gradient(m: Mapping[str, float]) -> Iterable[Finding]:
    cosine, clip, whole = (m.get(f"gradients/{name}") for name in ("cos_clipped", "clip_rel", "clipped_rel"))
    if cosine is None or clip is None or whole is None or cosine >= COSINE_WATCH or clip < whole / 2:
        return
    yield Finding(
        "problem" if cosine < COSINE_PROBLEM else "watch",
        f"What precision alone clips turns the gradient: with clipping its cosine with the clean one is "
        f"{number(cosine)} (0.55 in the TRL study's failing run), and what is clipped or not by precision alone makes "
        f"{number(clip)} of its size. objective.loss: no_clip or detach, or objective.ratio: shadow leaves them in.",
        _evidence(m, "gradients/cos_clipped", "gradients/clip_rel", "gradients/clipped_rel"),
    )


def _deployed(m: Mapping[str, float]) -> Iterable[Finding]:
    if "deployed/delta_abs_mean" in m and m["deployed/delta_abs_mean"] == 0.0:
        why = "The update may be too small for any rounding boundary; raise optim.lr."
        if m.get("weights/zero_frac") == 1.0:
            why = "The correction left no token to learn from."
        yield Finding(
            "watch",
            f"The step changed nothing that is served: every log-prob is what it was. {why}",
            _evidence(m, "deployed/delta_abs_mean", "quant/codes_changed_frac", "weights/zero_frac"),
        )
    efficiency = m.get("deployed/efficiency")
    if efficiency is None:
        return
    evidence = _evidence(m, "deployed/improvement", "deployed/delta_abs_mean", "deployed/efficiency")
    what = f"{percent(efficiency)} of the served policy's movement was along the advantages"
    paper = "the TRL study has 7.9% where training worked and 1.3% where it stalled, over 100 steps"
    if efficiency >= EFFICIENCY_FINE:
        yield Finding("fine", f"The step improved what is served: {what} ({paper}).", evidence)
    else:
        yield Finding(
            "watch",
            f"The step hardly improved what is served: {what}; {paper}. One step is noisy: look at "
            "several (diagnostics.deployed_every).",
            evidence,
        )


def _error_tokens(m: Mapping[str, float]) -> Iterable[Finding]:
    share = m.get("error_tokens/frac")
    if share is None:
        return
    names = ("frac", "repetitive_frac", "garbled_frac", "positive_frac", "negative_frac", "responses_frac")
    evidence = _evidence(m, *(f"error_tokens/{name}" for name in names))
    positive, negative = m.get("error_tokens/positive_frac", 0.0), m.get("error_tokens/negative_frac", 0.0)
    if share < ERROR_FRAC:
        yield Finding("fine", f"{percent(share)} of the tokens are in repetitive or garbled stretches.", evidence)
    elif negative > ERROR_SIGN * positive:
        yield Finding(
            "problem",
            f"Error tokens: {percent(share)} of the tokens are in repetitive or garbled stretches, {percent(negative)} "
            f"where A < 0 and {percent(positive)} where A > 0. QaRL found such tokens to drive the ratios of punished "
            "responses to extremes; objective.name: tbpo drops the response once it leaves its band.",
            evidence,
        )
    else:
        yield Finding(
            "watch",
            f"{percent(share)} of the tokens are in repetitive or garbled stretches, {percent(negative)} where A < 0 "
            f"and {percent(positive)} where A > 0. That is not QaRL's pattern: the model is that uncertain or "
            "repetitive by itself, or the task asks for it.",
            evidence,
        )


def _weights(m: Mapping[str, float]) -> Iterable[Finding]:
    ess, zero = m.get("weights/ess_frac"), m.get("weights/zero_frac")
    evidence = _evidence(m, "weights/mean", "weights/max", "weights/ess_frac", "weights/zero_frac")
    if zero is not None and zero > DROPPED_WATCH:
        yield Finding(
            "watch",
            f"The correction drops {percent(zero)} of the tokens; what is left may be too little to "
            "learn from. Widen its bounds, or remove the mismatch at its source.",
            evidence,
        )
    elif ess is not None and ess < WEIGHT_ESS_WATCH:
        yield Finding(
            "watch",
            f"The correction's weights are far from 1: the tokens are worth {percent(ess)} of their "
            "number after weighting.",
            evidence,
        )
    elif ess is not None:
        yield Finding("fine", f"The correction keeps {percent(ess)} of the tokens' worth.", evidence)


def _evidence(m: Mapping[str, float], *names: str) -> dict[str, float]:
    return {name: m[name] for name in names if name in m}


_CHECKS: tuple[Callable[[Mapping[str, float]], Iterable[Finding]], ...] = (
    _mismatch,
    _precision,
    _gradients,
    _clipped_gradient,
    _deployed,
    _tail,
    _skew,
    _growth,
    _weights,
    _error_tokens,
)
