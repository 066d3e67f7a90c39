"""What is maximised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from qarl.config.base import Fault, Field, Section
from qarl.config.limits import FACTOR, SMALLEST_TEMPERATURE

Ratio = Literal["train", "rollout", "shadow", "one"]
DvpOutside = Literal["response", "token"]

# What each objective reads, with its default (TBPO: QaRL appendix, GSPO, SAPO and DAPO: their papers, the rest: PPO's
# 0.2 and dual clip's 3). Keys that every objective reads are not listed.
_PPO: dict[str, Any] = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
_GSPO: dict[str, Any] = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
_CLIP = {"loss": "clip"}
OBJECTIVE_DEFAULTS: dict[str, dict[str, Any]] = {
    "tbpo": {
        "seq_clip_ratio_high": 4e-4,
        "seq_clip_ratio_low": 3e-4,
        "neg_seq_clip_ratio_high": 7e-4,
        "neg_seq_clip_ratio_low": 3e-4,
        "seq_tis_imp_ratio_cap": 2.0,
    },
    "grpo": _PPO | _CLIP,
    "dapo": _PPO | {"clip_ratio_high": 0.28} | _CLIP,
    "dual_clip_grpo": _PPO | {"clip_ratio_c": 3.0} | _CLIP,
    "gspo": _GSPO,
    "mis_gspo": _GSPO | {"mis_ratio_low": 0.5, "mis_ratio_high": 2.0},
    "sapo": {"sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05},
    "positive_only": _PPO | _CLIP,
    "on_policy": {},
    "reinforce": {},
    "rloo": {},
}
RATIO_OBJECTIVES = ("grpo", "dapo", "dual_clip_grpo", "positive_only", "gspo", "mis_gspo", "sapo")
CLIPPED_OBJECTIVES = ("grpo", "dapo", "dual_clip_grpo", "positive_only")  # token by token
SEQUENCE_OBJECTIVES = ("gspo", "mis_gspo", "tbpo")  # whose ratio is one of the response
# Group baselines: with one response a group every advantage would be 0.
GROUP_ADVANTAGES = ("grpo", "grpo_no_std", "rloo")

_ADVANTAGE = {"rloo": "rloo", "reinforce": "reinforce"}
_AGGREGATION = {"dapo": "token-mean", "reinforce": "seq-mean-token-sum", "rloo": "seq-mean-token-sum"}


class ObjectiveConfig(Section):
    """The surrogate. A key that the chosen objective does not read stays null."""

    name: Literal[
        "tbpo",
        "grpo",
        "dapo",
        "dual_clip_grpo",
        "gspo",
        "mis_gspo",
        "sapo",
        "positive_only",
        "on_policy",
        "reinforce",
        "rloo",
    ] = Field(
        "tbpo",
        description="tbpo (QaRL); token-level PPO clip: grpo, dapo, dual_clip_grpo, positive_only; sequence-level "
        "ratio: gspo, mis_gspo; sapo (smooth gate); without ratio: on_policy, reinforce, rloo.",
    )
    advantage: Literal["grpo", "grpo_no_std", "rloo", "reinforce"] | None = Field(
        None,
        description="Group mean and std, group mean only (Dr. GRPO), leave-one-out, or batch whitening; null: rloo "
        "for rloo (and no other), reinforce for reinforce, else grpo.",
    )
    aggregation: (
        Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] | None
    ) = Field(
        None,
        description="How token values become one number; null: token-mean for dapo, seq-mean-token-sum for reinforce "
        "and rloo, else seq-mean-token-mean.",
    )
    ratio: Ratio | None = Field(
        None,
        description="Of the objectives that clip or gate one. train: learner now over learner at the snapshot; "
        "rollout: learner now over the sampler (bypass); shadow: the sampler's arithmetic now over the sampler, with "
        "the learner's gradient; one: 1. null: that of correction.preset, or train.",
    )
    loss: Literal["clip", "detach", "detach_center", "no_clip"] | None = Field(
        None,
        description="grpo, dapo, dual_clip_grpo and positive_only. clip (default); detach: the clipped surrogate as a "
        "constant weight of the log-prob; detach_center: that minus its mean over the minibatch; no_clip: bounds of "
        "10 on both sides.",
    )
    seq_clip_ratio_high: float | None = Field(
        None, ge=0, le=FACTOR, description="tbpo, A > 0: no gain from a sequence ratio above 1 + this (default 4e-4)."
    )
    seq_clip_ratio_low: float | None = Field(
        None, ge=0, lt=1, description="tbpo, A > 0: the paper's lower bound; it never binds (default 3e-4)."
    )
    neg_seq_clip_ratio_high: float | None = Field(
        None, ge=0, le=FACTOR, description="tbpo, A < 0: responses above 1 + this give no gradient (default 7e-4)."
    )
    neg_seq_clip_ratio_low: float | None = Field(
        None, ge=0, lt=1, description="tbpo, A < 0: responses below 1 - this give no gradient (default 3e-4)."
    )
    seq_tis_imp_ratio_cap: float | None = Field(
        None, ge=1, le=FACTOR, description="tbpo: the mismatch weight is clipped to [1 / this, this] (default 2)."
    )
    clip_ratio_low: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Ratios are clipped at 1 - this: grpo, dapo, dual_clip_grpo (default 0.2), gspo and mis_gspo "
        "(default 3e-4). For positive_only it never binds.",
    )
    clip_ratio_high: float | None = Field(
        None,
        ge=0,
        le=FACTOR,
        description="Ratios are clipped at 1 + this: grpo, dual_clip_grpo, positive_only (default 0.2), dapo (default "
        "0.28), gspo and mis_gspo (default 4e-4).",
    )
    clip_ratio_c: float | None = Field(
        None, gt=1, le=FACTOR, description="dual_clip_grpo, A < 0: no gradient above this ratio (default 3)."
    )
    sapo_tau_pos: float | None = Field(
        None, ge=SMALLEST_TEMPERATURE, le=FACTOR, description="sapo, A > 0: temperature of the gate (default 1)."
    )
    sapo_tau_neg: float | None = Field(
        None, ge=SMALLEST_TEMPERATURE, le=FACTOR, description="sapo, A < 0: temperature of the gate (default 1.05)."
    )
    mis_ratio_low: float | None = Field(
        None,
        gt=0,
        le=FACTOR,
        description="mis_gspo: responses whose mean mismatch ratio is below this are dropped (default 0.5).",
    )
    mis_ratio_high: float | None = Field(
        None,
        gt=0,
        le=FACTOR,
        description="mis_gspo: responses whose mean mismatch ratio is above this are dropped (default 2).",
    )
    kl_coef: float = Field(
        0.0, ge=0, le=FACTOR, description="Weight of the KL to the policy the run started from; 0 is off."
    )
    kl_estimator: Literal["k1", "k2", "k3"] | None = Field(
        None, description="Of that KL, per token: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r (default)."
    )
    entropy_coef: float = Field(0.0, ge=0, le=FACTOR, description="Weight of an entropy bonus; 0 is off.")
    dvp_rho: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Dynamic vocabulary pruning: sampler and learner drop tokens less probable than this fraction of "
        "the most probable, each by its own logits; the paper uses exp(-13) = 2.26e-6. null: rollout.min_p.",
    )
    dvp_outside: DvpOutside | None = Field(
        None,
        description="What a sampled token outside the learner's set takes with it, as ratio 0: the whole response, or "
        "that token alone. null: response where the ratio is the response's (gspo, mis_gspo, tbpo, weights of level "
        "sequence or geometric, and reinforce and rloo but with token weights), else token.",
    )

    @property
    def own_keys(self) -> dict[str, Any]:
        """The keys that this objective reads and others do not, with their defaults (`loss` considered)."""
        read = OBJECTIVE_DEFAULTS[self.name]
        if self.loss == "no_clip":
            return {key: value for key, value in read.items() if key not in _PPO}
        return read

    @property
    def clips(self) -> bool:
        """Some ratios lose their gradient: the objective has a band."""
        token = self.name in CLIPPED_OBJECTIVES and self.loss not in ("detach", "detach_center")
        return token or self.name in SEQUENCE_OBJECTIVES

    def faults(self) -> Iterator[Fault]:
        read = self.own_keys
        for key in dict.fromkeys(key for keys in OBJECTIVE_DEFAULTS.values() for key in keys):
            value = getattr(self, key)
            if value is None or key in read:
                continue
            if key in OBJECTIVE_DEFAULTS[self.name]:
                yield Fault((key,), value, f"is not read with loss {self.loss}; leave null, or use loss clip")
                continue
            reads = f"{self.name} reads {', '.join(read)}" if read else "leave null"
            yield Fault((key,), value, f"is read by {_readers(key)}, not by {self.name}; {reads}")
        if self.ratio not in (None, "train") and self.name not in RATIO_OBJECTIVES:
            yield Fault(
                ("ratio",), self.ratio, f"is read by {_listed(RATIO_OBJECTIVES)}, not by {self.name}; leave null"
            )
        if self.name == "rloo" and self.advantage not in (None, "rloo"):
            yield Fault(
                ("advantage",), self.advantage, "rloo is reinforce with advantage rloo; leave null, or use reinforce"
            )
        low, high = (getattr(self, key) or read.get(key) for key in ("mis_ratio_low", "mis_ratio_high"))
        if self.name == "mis_gspo" and low >= high:
            yield Fault(("mis_ratio_low",), low, f"must be below objective.mis_ratio_high ({high:g})")
        if self.kl_estimator is not None and self.kl_coef == 0:
            yield Fault(("kl_estimator",), self.kl_estimator, "has no effect with kl_coef 0; set objective.kl_coef")

    def resolved(self) -> dict[str, Any]:
        defaults = dict(self.own_keys)
        defaults["advantage"] = _ADVANTAGE.get(self.name, "grpo")
        defaults["aggregation"] = _AGGREGATION.get(self.name, "seq-mean-token-mean")
        if self.kl_coef > 0:
            defaults["kl_estimator"] = "k3"
        return {key: value for key, value in defaults.items() if getattr(self, key) is None}


def dvp_outside_of(name: str, level: str | None) -> DvpOutside:
    """The default of dvp_outside: `response` where the ratio of the estimator is the response's (DVP, equation 22).

    name: objective.name. level: correction.level. reinforce and rloo have no ratio of their own: without a weight their
    estimator is the paper's, over trajectories, and with one it is the weight's.
    """
    if name in SEQUENCE_OBJECTIVES or level in ("sequence", "geometric"):
        return "response"
    return "response" if name in ("reinforce", "rloo") and level != "token" else "token"


def _readers(key: str) -> str:
    return _listed([name for name, keys in OBJECTIVE_DEFAULTS.items() if key in keys])


def _listed(names: list[str] | tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
