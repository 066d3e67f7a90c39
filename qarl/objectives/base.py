"""Base classes of the objectives: shared keys, methods that an objective may override, and the trust band.

`qarl check` imports these files and the objectives, so none of them imports torch at its top.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from pydantic import ConfigDict

from qarl.inputs.limits import FACTOR
from qarl.inputs.section import Fault, Field, Section
from qarl.objectives.common import INFINITE, Estimator, Surrogate, SurrogateInputs, clamped_exp
from qarl.objectives.segments import Aggregation, Segments
from qarl.objectives.teacher import TeacherConfig

if TYPE_CHECKING:
    from torch import Tensor

    from qarl.objectives.correction_config import CorrectionConfig

AdvantageKind = Literal["grpo", "grpo_no_std", "rloo", "reinforce"]
PruningLevel = Literal["response", "token"]
RatioKind = Literal["train", "rollout", "shadow", "one"]
SurrogateFunction = Callable[[SurrogateInputs], Surrogate]

# Types of shared keys whose default depends on the objective.
AdvantageKey = Annotated[
    AdvantageKind,
    Field(
        description="How rewards become advantages. grpo: minus the group's mean, divided by its standard "
        "deviation; grpo_no_std: minus the group's mean (Dr. GRPO); rloo: minus the mean of the group's other "
        "responses; reinforce: whitened over the batch."
    ),
]
AggregationKey = Annotated[
    Aggregation,
    Field(
        description="How token values become the minibatch's objective. seq-mean-token-mean: mean over responses of "
        "the mean over tokens (GRPO); token-mean: mean over all tokens (DAPO); seq-mean-token-sum: mean over "
        "responses of the sum over tokens; seq-mean-token-sum-norm: that divided by rollout.max_response_length "
        "(Dr. GRPO)."
    ),
]


def _require_name(schema: dict[str, Any], model: type[Section]) -> None:
    """Make `name` required in the schema, except for the default objective."""
    if model.model_fields["name"].default != DEFAULT:
        schema["required"] = ["name", *schema.get("required", ())]


DEFAULT = "tbpo"


class RunConfig(Protocol):
    """The part of the whole configuration (`qarl.config.Config`) that objectives read; it avoids an import cycle."""

    @property
    def objective(self) -> ObjectiveConfig: ...

    @property
    def correction(self) -> CorrectionConfig: ...

    @property
    def rollout(self) -> Any: ...

    @property
    def train(self) -> Any: ...

    @property
    def responses_per_step(self) -> int: ...

    @property
    def minibatch_size(self) -> int: ...

    @property
    def ranked(self) -> bool: ...

    @property
    def truncated(self) -> bool: ...

    def fault(self, key: str, text: str) -> Fault: ...


class ObjectiveConfig(Section):
    """Keys that every objective reads. A subclass adds `name`, its own keys, and `surrogate`."""

    model_config = ConfigDict(json_schema_extra=_require_name)

    name: str
    advantage: AdvantageKey = "grpo"
    aggregation: AggregationKey = "seq-mean-token-mean"
    mask_truncated: bool = Field(
        False,
        description="Set the advantage of truncated responses to 0 (DAPO's overlong filtering). They stay in the "
        "denominators of the aggregation.",
    )
    kl_coef: float = Field(
        0.0, ge=0, le=FACTOR, description="Weight of the KL divergence to the initial policy of the run. 0: off."
    )
    kl_estimator: Estimator | None = Field(
        None,
        description="Estimator of that KL, per token, with r reference over learner: k1 = -log r, k2 = (log r)^2 / 2, "
        "k3 = r - 1 - log r (default). k1 is used with the gradient of k2, because its own is 0 in expectation.",
    )
    entropy_coef: float = Field(0.0, ge=0, le=FACTOR, description="Weight of an entropy bonus. 0: off.")
    router_aux_coef: float = Field(
        0.0,
        ge=0,
        le=FACTOR,
        description="Weight of the load-balancing loss of a mixture of experts, on the scale of transformers' "
        "router_aux_loss_coef. 0: off.",
    )
    router_z_coef: float = Field(
        0.0,
        ge=0,
        le=FACTOR,
        description="Weight of the router z-loss, the mean square of the log-sum-exp of the router logits, "
        "summed over the layers. 0: off.",
    )
    dvp_rho: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Dynamic vocabulary pruning: sampler and learner drop tokens less probable than this fraction of "
        "the most probable, each by its own logits; the paper uses exp(-13) = 2.26e-6. null: rollout.min_p.",
    )
    dvp_outside: PruningLevel | None = Field(
        None,
        description="What gets weight 0 if a sampled token is outside the learner's truncated set: its response, or "
        "the token alone. null: response with dvp_rho and without rollout.top_p and top_k, if the estimator has one "
        "ratio per response; else token.",
    )
    truncation_set: Literal["own", "replay"] = Field(
        "own",
        description="Tokens that the learner normalizes over with rollout.top_p or top_k. own: from its logits in each "
        "forward; replay: the set at the rollout's weights, in all forwards of a step.",
    )

    teacher: TeacherConfig | None = Field(
        None, description="Policy whose distribution the learner approximates (distillation); null: none."
    )

    rewarded: ClassVar[bool] = True
    """Whether the objective learns from rewards."""
    own_ratio: ClassVar[RatioKind] = "one"
    """Ratio of objectives without the key `ratio`."""
    sequence_ratio: ClassVar[bool] = False
    """The objective has one ratio per response, not one per token."""

    @abstractmethod
    def surrogate(self, inputs: SurrogateInputs) -> Surrogate:
        """Compute the value of each token, to maximize, and statistics."""

    def bind(self) -> SurrogateFunction:
        """Return `surrogate` ready to call. Raises UserError if a user's file cannot be used."""
        return self.surrogate

    @property
    def ratio_kind(self) -> RatioKind:
        """The ratio whose log is `SurrogateInputs.log_ratio`."""
        return self.own_ratio

    @property
    def router_floor(self) -> float | None:
        """Lower bound of the router-shift ratio that multiplies the ratio; None if it is not used."""
        return None

    @property
    def band(self) -> Band | None:
        """Ratios that give a gradient; None if no token loses its gradient at a bound."""
        return None

    @property
    def centers(self) -> bool:
        """Whether `surrogate` reads `SurrogateInputs.center`."""
        return False

    @property
    def idle_at_zero(self) -> bool:
        """Whether a token with advantage 0 has value 0 and no gradient."""
        return True

    def center(self, inputs: SurrogateInputs) -> float:
        """Compute `SurrogateInputs.center` from the tokens of a whole minibatch."""
        return 0.0

    def corrected(self, correction: CorrectionConfig) -> CorrectionConfig:
        """Return the configured correction with the objective's own weight or rules added."""
        return correction

    def one_ratio_per_response(self, level: str | None) -> bool:
        """Whether the estimator weights whole responses (DVP, eq. 22), given `correction.level`."""
        return self.sequence_ratio or level in ("sequence", "geometric")

    def default_pruning(self, level: str | None) -> PruningLevel:
        """Default of `dvp_outside` without top-p and top-k, given `correction.level`.

        The estimator that drops whole responses is defined for dynamic vocabulary pruning only: `dvp_rho` cuts the
        same relative tail on both sides. Plain min-p gets `token`.
        """
        return "response" if self.dvp_rho is not None and self.one_ratio_per_response(level) else "token"

    def faults_in(self, config: RunConfig) -> Iterator[Fault]:
        """Report values of other sections that this objective cannot be combined with."""
        yield from ()

    def faults(self) -> Iterator[Fault]:
        if self.kl_estimator is not None and self.kl_coef == 0:
            yield self.fault("kl_estimator", "has no effect with kl_coef 0; set objective.kl_coef")

    def resolved(self) -> dict[str, Any]:
        return {"kl_estimator": "k3"} if self.kl_coef > 0 and self.kl_estimator is None else {}


class RatioObjective(ObjectiveConfig):
    """Base of objectives that clip or gate the ratio chosen by `ratio`."""

    ratio: RatioKind | None = Field(
        None,
        description="train: learner now over learner at the rollout's weights; rollout: learner now over the sampler "
        "(bypass); shadow: the sampler's arithmetic now over the sampler, with the learner's gradient; one: value 1, "
        "with the learner's gradient. null: the ratio of correction.preset if it sets one, else train.",
    )

    router_shift_floor: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Mixture of experts: multiply a token's ratio by max(exp(-d), this value), without gradient "
        "(RSPO). d is the mean change of the router log-probs since the rollout. null: off.",
    )

    @property
    def ratio_kind(self) -> RatioKind:
        return self.ratio or "train"

    @property
    def router_floor(self) -> float | None:
        return self.router_shift_floor

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        if self.router_shift_floor is not None and self.ratio == "one":
            text = "multiplies the ratio, which objective.ratio one fixes at 1; leave null, or use another ratio"
            yield self.fault("router_shift_floor", text)


@dataclass(frozen=True)
class Band:
    """Ratios that give a gradient, bounds included, as reported to diagnostics. Surrogates do their own clipping."""

    level: Literal["token", "sequence"]  # one ratio per token, or per response: the geometric mean over its tokens
    high: float  # upper bound for A > 0
    low: float  # lower bound for A < 0
    neg_high: float = math.inf  # upper bound for A < 0

    def comparable(self, log_ratio: Tensor) -> Tensor:
        """Return the log ratio per token (T,), with infinite ones replaced by 0 if the band is per response.

        Otherwise one token outside a truncated distribution would move its whole response outside the band.
        """
        return log_ratio if self.level == "token" else log_ratio.masked_fill(log_ratio.abs() >= INFINITE, 0.0)

    def beyond(self, log_ratio: Tensor, segments: Segments) -> Tensor:
        """Find tokens, (T,) bool, whose ratio is outside [low, high] for either sign of the advantage."""
        ratio = self._ratio(log_ratio, segments)
        return self._by_token((ratio < self.low) | (ratio > self.high), segments)

    def outside(self, log_ratio: Tensor, advantages: Tensor, segments: Segments) -> Tensor:
        """Find tokens, (T,) bool, without gradient, for log ratios (T,) and advantages (R,)."""
        ratio = self._ratio(log_ratio, segments)
        advantage = segments.expand(advantages) if self.level == "token" else advantages
        too_low, too_high = ratio < self.low, ratio > self.neg_high
        lost = ((advantage > 0) & (ratio > self.high)) | ((advantage < 0) & (too_low | too_high))
        return self._by_token(lost, segments)

    def _ratio(self, log_ratio: Tensor, segments: Segments) -> Tensor:
        """Return the ratio that the bounds apply to: (T,) or, at level sequence, (R,)."""
        return clamped_exp(log_ratio if self.level == "token" else segments.mean(log_ratio))[0]

    def _by_token(self, mask: Tensor, segments: Segments) -> Tensor:
        return mask if self.level == "token" else segments.expand(mask)
