"""What is maximised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from qarl.config.base import Fault, Field, Section

# Default of every key that only some objectives read (TBPO: QaRL appendix, GSPO: its paper, GRPO: PPO's 0.2).
OBJECTIVE_DEFAULTS: dict[str, dict[str, float]] = {
    "tbpo": {
        "seq_clip_ratio_high": 4e-4,
        "seq_clip_ratio_low": 3e-4,
        "neg_seq_clip_ratio_high": 7e-4,
        "neg_seq_clip_ratio_low": 3e-4,
        "seq_tis_imp_ratio_cap": 2.0,
    },
    "grpo": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2},
    "gspo": {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4},
}
# Group baselines: with one response a group every advantage would be 0.
GROUP_ADVANTAGES = ("grpo", "grpo_no_std", "rloo")


class ObjectiveConfig(Section):
    """The surrogate. A key that the chosen objective does not read stays null."""

    name: Literal["tbpo", "grpo", "gspo"] = Field(
        "tbpo", description="tbpo (QaRL), grpo (token-level PPO clip), or gspo (sequence-level ratio)."
    )
    advantage: Literal["grpo", "grpo_no_std", "rloo", "reinforce"] = Field(
        "grpo", description="Group mean and std, group mean only (Dr. GRPO), leave-one-out, or batch whitening."
    )
    aggregation: Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = Field(
        "seq-mean-token-mean", description="How token values become one number."
    )
    seq_clip_ratio_high: float | None = Field(
        None, ge=0, description="tbpo, A > 0: no gain from a sequence ratio above 1 + this (default 4e-4)."
    )
    seq_clip_ratio_low: float | None = Field(
        None, ge=0, lt=1, description="tbpo, A > 0: the paper's lower bound; it never binds (default 3e-4)."
    )
    neg_seq_clip_ratio_high: float | None = Field(
        None, ge=0, description="tbpo, A < 0: responses above 1 + this give no gradient (default 7e-4)."
    )
    neg_seq_clip_ratio_low: float | None = Field(
        None, ge=0, lt=1, description="tbpo, A < 0: responses below 1 - this give no gradient (default 3e-4)."
    )
    seq_tis_imp_ratio_cap: float | None = Field(
        None, ge=1, description="tbpo: the mismatch weight is clipped to [1 / this, this] (default 2)."
    )
    clip_ratio_low: float | None = Field(
        None, ge=0, lt=1, description="grpo (default 0.2) and gspo (default 3e-4): ratios are clipped at 1 - this."
    )
    clip_ratio_high: float | None = Field(
        None, ge=0, description="grpo (default 0.2) and gspo (default 4e-4): ratios are clipped at 1 + this."
    )

    def faults(self) -> Iterator[Fault]:
        read = OBJECTIVE_DEFAULTS[self.name]
        for key in dict.fromkeys(key for keys in OBJECTIVE_DEFAULTS.values() for key in keys):
            value = getattr(self, key)
            if value is not None and key not in read:
                readers = " and ".join(name for name, keys in OBJECTIVE_DEFAULTS.items() if key in keys)
                valid = f"is read by {readers}, not by {self.name}; {self.name} reads {', '.join(read)}"
                yield Fault((key,), value, valid)

    def resolved(self) -> dict[str, Any]:
        return {key: value for key, value in OBJECTIVE_DEFAULTS[self.name].items() if getattr(self, key) is None}
