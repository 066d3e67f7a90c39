"""Named corrections: what `correction.preset` stands for.

Names and bounds of verl (trainer/config/algorithm.py, RolloutCorrectionConfig), whose rejection by k1 between two ratio
bounds is a ratio rule here, with its bounds on the ratio itself; and of VeXact (section 4.2 and appendix A.4, with
tau_tok 2 and tau_seq 1e-3).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

PresetName = Literal[
    "recompute",
    "bypass",
    "tis",
    "seq_tis",
    "mis",
    "seq_mis",
    "token_mis",
    "icepop",
    "geo_rs",
    "geo_rs_token_tis",
    "geo_rs_seq_tis",
    "k3_rs",
    "k3_rs_token_tis",
    "k3_rs_seq_tis",
    "bypass_geo_rs",
    "bypass_k3_rs",
    "bypass_pg_is",
    "bypass_pg_geo_rs",
    "bypass_pg_geo_rs_token_tis",
    "srs-k3-corr",
    "srs-k3-ppo",
    "tis-srs-k1-corr",
    "tis-srs-k3-corr",
]


class Preset(NamedTuple):
    """weights: level, mode, lower, upper and signal of the importance weight; None for no weight. reject: rules. ratio:
    objective.ratio, None where the preset leaves it open. policy_gradient: only for an objective without a ratio."""

    weights: dict[str, Any] | None = None
    reject: tuple[dict[str, Any], ...] = ()
    ratio: Literal["train", "rollout"] | None = None
    policy_gradient: bool = False


def _rule(estimator: str, aggregate: str, upper: float, lower: float | None = None, signal: str = "corr") -> dict:
    return {"estimator": estimator, "signal": signal, "aggregate": aggregate, "lower": lower, "upper": upper}


_TOKEN_TIS = {"level": "token", "mode": "truncate", "lower": None, "upper": 2.0}
_SEQ_TIS = {"level": "sequence", "mode": "truncate", "lower": None, "upper": 2.0}
_GEO_RS = (_rule("ratio", "mean", 1.001, 0.999),)
_K3_RS = (_rule("k3", "mean", 0.01),)

PRESETS: dict[str, Preset] = {
    "recompute": Preset(ratio="train"),
    "bypass": Preset(ratio="rollout"),
    "tis": Preset(_TOKEN_TIS),
    "seq_tis": Preset(_SEQ_TIS),
    "mis": Preset({"level": "sequence", "mode": "mask", "lower": None, "upper": 2.0}),
    "seq_mis": Preset(_SEQ_TIS, (_rule("ratio", "sum", 2.0, 0.5),)),
    "token_mis": Preset({"level": "token", "mode": "mask", "lower": None, "upper": 2.0}),
    "icepop": Preset({"level": "token", "mode": "mask", "lower": 0.5, "upper": 5.0}),
    "geo_rs": Preset(reject=_GEO_RS),
    "geo_rs_token_tis": Preset(_TOKEN_TIS, _GEO_RS),
    "geo_rs_seq_tis": Preset(_SEQ_TIS, _GEO_RS),
    "k3_rs": Preset(reject=_K3_RS),
    "k3_rs_token_tis": Preset(_TOKEN_TIS, _K3_RS),
    "k3_rs_seq_tis": Preset(_SEQ_TIS, _K3_RS),
    # In verl's bypass the rejected ratio is that of the loss, learner now over sampler.
    "bypass_geo_rs": Preset(reject=(_rule("ratio", "mean", 1.001, 0.999, "rollout"),), ratio="rollout"),
    "bypass_k3_rs": Preset(reject=(_rule("k3", "mean", 0.01, signal="rollout"),), ratio="rollout"),
    # verl's bypass mode with loss_type reinforce: the weight is learner now over sampler, and nothing is clipped.
    "bypass_pg_is": Preset(_SEQ_TIS | {"signal": "rollout"}, policy_gradient=True),
    "bypass_pg_geo_rs": Preset(reject=(_rule("ratio", "mean", 1.001, 0.999, "rollout"),), policy_gradient=True),
    "bypass_pg_geo_rs_token_tis": Preset(
        _TOKEN_TIS | {"signal": "rollout"}, (_rule("ratio", "mean", 1.001, 0.999, "rollout"),), policy_gradient=True
    ),
    "srs-k3-corr": Preset(reject=(_rule("k3", "sum", 1e-3),), ratio="rollout"),
    "srs-k3-ppo": Preset(reject=(_rule("k3", "sum", 1e-3, signal="rollout"),), ratio="rollout"),
    "tis-srs-k1-corr": Preset(_TOKEN_TIS, (_rule("k1", "sum", 1e-3),), "train"),
    "tis-srs-k3-corr": Preset(_TOKEN_TIS, (_rule("k3", "sum", 1e-3),), "train"),
}
