"""Second implementation of all objectives and corrections: Python floats, a loop over responses, no code of qarl.

What the program treats as a constant in the backward (weights, stop-gradients) is computed from `frozen`, the log-probs
at the point of differentiation; `l` alone is moved by finite differences.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Row = list[float]


@dataclass
class Response:
    l: Row  # noqa: E741
    o: Row
    b: Row
    q: Row
    ref: Row
    h: Row
    a: float


def exp(x: float) -> float:
    return math.exp(max(-20.0, min(20.0, x)))


def difference(u: float, v: float) -> float:
    """Return u - v; an infinite value is far beyond every bound, two equal infinities have difference 0."""
    return 0.0 if u == v else max(-1e12, min(1e12, u - v))


def differences(x: Row, y: Row) -> Row:
    return [difference(u, v) for u, v in zip(x, y, strict=True)]


def outside(cfg: Any, r: Response, frozen: Row) -> list[bool]:
    """Return which tokens are outside the learner's set: their ratio is 0."""
    by_shadow = cfg.ratio_kind == "shadow"
    columns = zip(frozen, r.o, r.q, strict=True)
    return [l == -math.inf or o == -math.inf or (by_shadow and q == -math.inf) for l, o, q in columns]  # noqa: E741


def mean_inside(x: Row, out: list[bool]) -> float:
    """Return the mean over all tokens, with 0 for those outside the learner's set."""
    return math.fsum(v for v, gone in zip(x, out, strict=True) if not gone) / len(x)


def mean(x: Row) -> float:
    return math.fsum(x) / len(x)


def token_ratios(kind: str, r: Response, frozen: Row) -> Row:
    if kind == "train":
        return [exp(x) for x in differences(r.l, r.o)]
    if kind == "rollout":
        return [exp(x) for x in differences(r.l, r.b)]
    if kind == "shadow":
        return [exp(x) * math.exp(y) for x, y in zip(differences(r.q, r.b), differences(r.l, frozen), strict=True)]
    return [math.exp(x) for x in differences(r.l, frozen)]


def ppo(ratio: float, a: float, low: float, high: float, c: float | None) -> float:
    value = min(ratio * a, max(low, min(high, ratio)) * a)
    return max(value, c * a) if a < 0 and c is not None else value


def sequence_value(ratio: float, a: float, name: str, cfg: Any) -> tuple[float, bool]:
    """Return (value, whether it is constant) of one response."""
    if name == "tbpo":
        if a > 0:
            return min(ratio * a, min(ratio, 1 + cfg.seq_clip_ratio_high) * a), ratio > 1 + cfg.seq_clip_ratio_high
        low, high = 1 - cfg.neg_seq_clip_ratio_low, 1 + cfg.neg_seq_clip_ratio_high
        return a * max(low, min(high, ratio)), not low <= ratio <= high
    low, high = 1 - cfg.clip_ratio_low, 1 + cfg.clip_ratio_high
    value = min(ratio * a, max(low, min(high, ratio)) * a)
    return value, value != ratio * a


def _c(cfg: Any) -> float | None:
    """Return dual clip's bound; only one objective has it."""
    return cfg.clip_ratio_c if cfg.name == "dual_clip_grpo" else None


def values(cfg: Any, r: Response, frozen: Row, center: float = 0.0, pruning: str = "token") -> Row:
    """Return the objective per token of a response, before correction and penalties. cfg: An ObjectiveConfig."""
    out = outside(cfg, r, frozen)
    if pruning == "response" and any(out):
        return [0.0] * len(out)
    return [0.0 if gone else x for x, gone in zip(unpruned_values(cfg, r, frozen, center), out, strict=True)]


def unpruned_values(cfg: Any, r: Response, frozen: Row, center: float) -> Row:
    if cfg.name in ("reinforce", "rloo"):
        return [r.a * x for x in r.l]
    if cfg.name == "on_policy":
        return [r.a * math.exp(x) for x in differences(r.l, frozen)]
    if cfg.name in ("gspo", "mis_gspo", "tbpo"):
        at = Response(frozen, r.o, r.b, r.q, r.ref, r.h, r.a)
        tokens = token_ratios(cfg.ratio_kind, at, frozen)
        s = exp(mean_inside([math.log(x) for x in tokens], outside(cfg, r, frozen))) if tokens else 1.0
        value, constant = sequence_value(s, r.a, cfg.name, cfg)
        return [value if constant else r.a * s * math.exp(x) for x in differences(r.l, frozen)]

    if cfg.name in ("gmpo", "rspo"):
        at = Response(frozen, r.o, r.b, r.q, r.ref, r.h, r.a)
        out, moved = outside(cfg, r, frozen), [math.log(x) for x in token_ratios(cfg.ratio_kind, at, frozen)]
        bound = cfg.clip_ratio_high if r.a > 0 else -cfg.clip_ratio_low
        clipped = [r.a != 0 and x * r.a > bound * r.a for x in moved]
        s = exp(mean_inside([bound if cut else x for x, cut in zip(moved, clipped, strict=True)], out)) if out else 1.0
        own = differences(r.l, frozen)
        return [r.a * s * (1.0 if cut else math.exp(x)) for x, cut in zip(own, clipped, strict=True)]

    ratios = token_ratios(cfg.ratio_kind, r, frozen)
    if cfg.name == "sapo":
        tau = cfg.sapo_tau_pos if r.a > 0 else cfg.sapo_tau_neg
        return [4 / tau / (1 + math.exp(-tau * (x - 1))) * r.a for x in ratios]
    if cfg.name == "m2po":
        at = Response(frozen, r.o, r.b, r.q, r.ref, r.h, r.a)
        moved = [abs(math.log(x)) if x > 0 else math.inf for x in token_ratios(cfg.ratio_kind, at, frozen)]
        return [0.0 if x > center + 1e-12 else ratio * r.a for x, ratio in zip(moved, ratios, strict=True)]
    if cfg.name == "positive_only" and r.a < 0:
        return [0.0] * len(ratios)
    low, high = (0.0, 11.0) if cfg.loss == "no_clip" else (1 - cfg.clip_ratio_low, 1 + cfg.clip_ratio_high)
    if cfg.loss in ("detach", "detach_center"):
        return [(w - center) * x for w, x in zip(unpruned_w(cfg, r, frozen), r.l, strict=True)]
    return [ppo(x, r.a, low, high, _c(cfg)) for x in ratios]


def m2po_edge(cfg: Any, responses: list[Response], frozen: list[Row], pruning: str) -> float:
    """The largest |log r| that stays after dropping the largest, one by one, until the mean square is small enough."""
    moved: Row = []
    for r, f in zip(responses, frozen, strict=True):
        out = outside(cfg, r, f)
        if not (pruning == "response" and any(out)):
            own = token_ratios(cfg.ratio_kind, Response(f, r.o, r.b, r.q, r.ref, r.h, r.a), f)
            moved += [abs(math.log(x)) for x, gone in zip(own, out, strict=True) if not gone]
    moved.sort()
    while moved and math.fsum(x * x for x in moved) / len(moved) > cfg.m2_threshold:
        largest = moved[-1]
        moved = [x for x in moved if x < largest]  # equal ones go together
    return moved[-1] if moved else -1.0


def weights_w(cfg: Any, r: Response, frozen: Row, pruning: str = "token") -> Row:
    """Return W of detach, from the log-probs at the point of differentiation; 0 for pruned tokens."""
    out = outside(cfg, r, frozen)
    if pruning == "response" and any(out):
        return [0.0] * len(out)
    return [0.0 if gone else w for w, gone in zip(unpruned_w(cfg, r, frozen), out, strict=True)]


def unpruned_w(cfg: Any, r: Response, frozen: Row) -> Row:
    if cfg.name == "positive_only" and r.a < 0:
        return [0.0] * len(frozen)
    at = Response(frozen, r.o, r.b, r.q, r.ref, r.h, r.a)
    low, high = 1 - cfg.clip_ratio_low, 1 + cfg.clip_ratio_high
    return [ppo(x, r.a, low, high, _c(cfg)) for x in token_ratios(cfg.ratio_kind, at, frozen)]


def k(estimator: str, x: float) -> float:
    """Return K(r), given log r."""
    return {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[estimator]


def kl(estimator: str, ref: float, l: float, frozen: float) -> float:  # noqa: E741
    """The KL term of a token. k1 has its value at the point of differentiation, and changes with l as k2 does."""
    if estimator == "k1":
        return k("k1", ref - frozen) + k("k2", ref - l) - k("k2", ref - frozen)
    return k(estimator, ref - l)


def inside(x: Row, out: list[bool]) -> Row:
    """Log ratios in which tokens outside the learner's set count as unmoved."""
    return [0.0 if gone else v for v, gone in zip(x, out, strict=True)]


def passes(rule: Any, r: Response, out: list[bool]) -> bool:
    x = inside(differences(r.o if rule.signal == "corr" else r.l, r.b), out)
    lower = -math.inf if rule.lower is None else rule.lower
    upper = math.inf if rule.upper is None else rule.upper
    if not x or rule.aggregate == "token":
        return True
    if rule.estimator == "ratio":
        if rule.aggregate == "max":
            return all(lower <= exp(d) <= upper for d in x)
        return lower <= exp(math.fsum(x) if rule.aggregate == "sum" else mean(x)) <= upper
    each = [k(rule.estimator, max(-20.0, min(20.0, d))) for d in x]
    return lower <= {"sum": math.fsum, "mean": mean, "max": max}[rule.aggregate](each) <= upper


def token_passes(rule: Any, learner: float, sampler: float) -> bool:
    """Return whether a rule that drops single tokens keeps this one."""
    x = difference(learner, sampler)
    score = exp(x) if rule.estimator == "ratio" else k(rule.estimator, max(-20.0, min(20.0, x)))
    lower = -math.inf if rule.lower is None else rule.lower
    return lower <= score <= (math.inf if rule.upper is None else rule.upper)


def importance(cfg: Any, r: Response, out: list[bool], pruning: str) -> Row:
    """Return the importance weights of a CorrectionConfig, before rules and veto."""
    learner = r.l if cfg.signal == "rollout" else r.o
    delta = [0.0 if gone else d for d, gone in zip(differences(learner, r.b), out, strict=True)]
    if cfg.level == "none":
        return [1.0] * len(delta)
    if any(out) and pruning == "response":
        return [0.0] * len(delta)
    exponents = {
        "token": [-math.inf if gone else d for d, gone in zip(delta, out, strict=True)],
        "sequence": [math.fsum(delta)] * len(delta),
        "geometric": [math.fsum(delta) / max(len(delta), 1)] * len(delta),
    }[cfg.level]
    if cfg.level == "token":
        return [0.0 if gone else x for x, gone in zip(bounded(cfg, exponents), out, strict=True)]
    return bounded(cfg, exponents)


def bounded(cfg: Any, exponents: Row) -> Row:
    if cfg.mode == "raw":
        return [exp(x) for x in exponents]
    low = -math.inf if cfg.lower is None else cfg.lower
    if cfg.mode == "truncate":
        return [max(low, min(cfg.upper, exp(x))) for x in exponents]
    return [exp(x) if low <= exp(x) <= cfg.upper else 0.0 for x in exponents]


def optimal_cap(cfg: Any, responses: list[Response], outs: list[list[bool]], pruning: str) -> float:
    """Return sqrt(2 E[rho^2]) over the tokens that are not pruned."""
    squares = []
    for r, out in zip(responses, outs, strict=True):
        if pruning == "response" and any(out):
            continue
        learner = r.l if cfg.signal == "rollout" else r.o
        delta = inside(differences(learner, r.b), out)
        if cfg.level == "token":
            squares += [exp(d) ** 2 for d, gone in zip(delta, out, strict=True) if not gone]
        elif delta:
            squares.append(exp(math.fsum(delta) if cfg.level == "sequence" else mean(delta)) ** 2)
    return math.sqrt(2 * mean(squares)) if squares else math.inf


def correction(objective: Any, cfg: Any, responses: list[Response], pruning: str = "token") -> list[Row]:
    """The final weight of each token of each response; `responses` at the point of differentiation."""
    outs = [outside(objective, r, r.l) for r in responses]
    if cfg.cap == "auto":
        cfg = cfg.model_copy(update={"upper": optimal_cap(cfg, responses, outs, pruning)})
    rows = [importance(cfg, r, out, pruning) for r, out in zip(responses, outs, strict=True)]
    if objective.name == "tbpo":
        cap = objective.seq_tis_imp_ratio_cap
        rows = [
            [
                0.0
                if pruning == "response" and any(out)
                else max(1 / cap, min(cap, exp(mean_inside(differences(r.o, r.b), out))))
            ]
            * len(r.o)
            if r.o
            else []
            for r, out in zip(responses, outs, strict=True)
        ]
    if objective.name == "mis_gspo":
        low, high = objective.mis_ratio_low, objective.mis_ratio_high
        products = [exp(math.fsum(inside(differences(r.o, r.b), out))) for r, out in zip(responses, outs, strict=True)]
        rows = [
            [0.0 if (pruning == "response" and any(out)) or not low <= w <= high else w] * len(r.o)
            for r, out, w in zip(responses, outs, products, strict=True)
        ]
    if cfg.normalize:
        per_unit = [x for row in rows for x in row] if cfg.level == "token" else [row[0] for row in rows if row]
        rows = [[x / (mean(per_unit) or 1.0) for x in row] for row in rows]
    found = []
    for r, row, out in zip(responses, rows, outs, strict=True):
        keep = all(passes(rule, r, out) for rule in cfg.reject or [])
        keep &= cfg.veto is None or all(exp(d) >= cfg.veto for d in inside(differences(r.o, r.b), out))
        keep &= pruning == "token" or not any(out)
        learner = {"corr": r.o, "rollout": r.l}
        single = [rule for rule in cfg.reject or [] if rule.aggregate == "token"]
        passed = [all(token_passes(rule, learner[rule.signal][i], r.b[i]) for rule in single) for i in range(len(row))]
        found.append([x if keep and passed[i] and not out[i] else 0.0 for i, x in enumerate(row)])
    return found


def loss(
    objective: Any, cfg: Any, responses: list[Response], frozen: list[Row], max_tokens: int, pruning: str = "token"
) -> float:
    """The loss of a minibatch. frozen: the log-probs of each response at the point of differentiation. pruning: what a
    token outside takes with it."""
    still = [Response(f, r.o, r.b, r.q, r.ref, r.h, r.a) for f, r in zip(frozen, responses, strict=True)]
    weights = correction(objective, cfg, still, pruning)
    center = 0.0
    if objective.name == "m2po":
        center = m2po_edge(objective, responses, frozen, pruning)
    elif objective.centers:
        center = mean([w for f, r in zip(frozen, responses, strict=True) for w in weights_w(objective, r, f, pruning)])
    tokens = sum(len(r.l) for r in responses)
    total = 0.0
    for r, f, w in zip(responses, frozen, weights, strict=True):
        worth = [v * x for v, x in zip(values(objective, r, f, center, pruning), w, strict=True)]
        for i in range(len(worth)):
            if objective.kl_coef and math.isfinite(r.ref[i]) and math.isfinite(f[i]):
                worth[i] -= objective.kl_coef * kl(objective.kl_estimator, r.ref[i], r.l[i], f[i])
            worth[i] += objective.entropy_coef * r.h[i]
        if not worth:
            continue
        total += {
            "seq-mean-token-mean": mean(worth) / len(responses),
            "token-mean": math.fsum(worth) / tokens,
            "seq-mean-token-sum": math.fsum(worth) / len(responses),
            "seq-mean-token-sum-norm": math.fsum(worth) / len(responses) / max_tokens,
        }[objective.aggregation]
    return -total


def gradient_of_formula(formula: Callable[[], float], responses: list[Response]) -> Row:
    """Central differences by each `l`, of an error of order step^2 + 1e-16 / step; 0 where it is infinite."""
    step, found = 1e-6, []
    for r in responses:
        for i, x in enumerate(r.l):
            if x == -math.inf:
                found.append(0.0)
                continue
            r.l[i] = x + step
            up = formula()
            r.l[i] = x - step
            found.append((up - formula()) / (2 * step))
            r.l[i] = x
    return found
