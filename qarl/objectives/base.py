"""What every objective shares: the keys of its section, and what the framework asks of it.

An objective is one class in one file, its keys above and its maths below; `registry.py` lists the classes. `qarl check`
reads these files and loads no torch, so that what they import at the top loads none either: tensors bring their own
methods.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict

from qarl.config.base import Fault, Field, Section
from qarl.config.limits import FACTOR
from qarl.objectives.aggregate import Aggregation
from qarl.objectives.proximal import RatioKind
from qarl.objectives.regularizers import Estimator

if TYPE_CHECKING:
    from qarl.config.config import Config
    from qarl.objectives.band import Band
    from qarl.objectives.correction.combined import Correction
    from qarl.objectives.surrogate import Surrogate
    from qarl.objectives.tokens import SurrogateInputs

AdvantageKind = Literal["grpo", "grpo_no_std", "rloo", "reinforce"]
PruningLevel = Literal["response", "token"]
TruncationSet = Literal["own", "replay"]
SurrogateFunction = Callable[["SurrogateInputs"], "Surrogate"]
"""What an objective is at its core: of a micro-batch's tokens, what each of them is worth."""

# Types of shared keys whose default is the objective's own.
AdvantageKey = Annotated[
    AdvantageKind,
    Field(description="Group mean and std, group mean only (Dr. GRPO), leave-one-out, or batch whitening."),
]
AggregationKey = Annotated[Aggregation, Field(description="How token values become one number.")]


def _require_name(schema: dict[str, Any], model: type[Section]) -> None:
    """In the schema, a section without a name is the default objective's alone."""
    if model.model_fields["name"].default != DEFAULT:
        schema["required"] = ["name", *schema.get("required", ())]


DEFAULT = "tbpo"


class ObjectiveConfig(Section):
    """Keys that every objective reads. A subclass has its `name`, its own keys, and `surrogate`."""

    model_config = ConfigDict(json_schema_extra=_require_name)

    name: str
    advantage: AdvantageKey = "grpo"
    aggregation: AggregationKey = "seq-mean-token-mean"
    kl_coef: float = Field(
        0.0, ge=0, le=FACTOR, description="Weight of the KL to the policy the run started from; 0 is off."
    )
    kl_estimator: Estimator | None = Field(
        None,
        description="Of that KL, per token, with r reference over learner: k1 = -log r, k2 = (log r)^2 / 2, "
        "k3 = r - 1 - log r (default). k1 has the gradient of k2, which is the KL's; its own is 0 in expectation.",
    )
    entropy_coef: float = Field(0.0, ge=0, le=FACTOR, description="Weight of an entropy bonus; 0 is off.")
    router_aux_coef: float = Field(
        0.0,
        ge=0,
        le=FACTOR,
        description="Weight of the load-balancing loss of a mixture of experts, on the scale of transformers' "
        "router_aux_loss_coef: over all layers together, and k for k experts per token that are used equally often; "
        "0 is off.",
    )
    router_z_coef: float = Field(
        0.0,
        ge=0,
        le=FACTOR,
        description="Weight of every router's z-loss, the mean square of its logits' log-sum-exp; 0 is off.",
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
        description="What gets weight 0 if a sampled token is outside the learner's truncated set: its whole response, "
        "or the token alone. null: response with dvp_rho, without rollout.top_p and top_k, if the estimator has one "
        "ratio per response (tbpo, gspo, mis_gspo, correction.level sequence or geometric, reinforce and rloo without "
        "token weights); else token.",
    )
    truncation_set: TruncationSet = Field(
        "own",
        description="The set of tokens that the learner normalizes over with rollout.top_p or top_k. own: from its "
        "logits at each forward; replay: the set at the rollout's weights in all forwards of a step, so that no token "
        "falls out because the learner moved. A set takes 4 bytes of host memory per token id, V / 8 bytes at most.",
    )

    own_ratio: ClassVar[RatioKind] = "one"
    """The ratio of an objective that has no key for it."""
    sequence_ratio: ClassVar[bool] = False
    """Whether the objective has one ratio per response, not one per token."""
    idle_at_zero: ClassVar[bool] = True
    """A token of advantage 0 has value and gradient 0."""

    @abstractmethod
    def surrogate(self, inputs: SurrogateInputs) -> Surrogate:
        """What each token is worth, and statistics."""

    def bind(self) -> SurrogateFunction:
        """`surrogate`, ready to be called. Raises UserError where it is a file's that cannot be used."""
        return self.surrogate

    @property
    def ratio_kind(self) -> RatioKind:
        """The ratio that `SurrogateInputs.log_ratio` is of."""
        return self.own_ratio

    @property
    def band(self) -> Band | None:
        """Where the ratio still gives gradient; None where nothing loses its gradient at an edge."""
        return None

    @property
    def centers(self) -> bool:
        """`surrogate` reads `SurrogateInputs.center`."""
        return False

    def center(self, inputs: SurrogateInputs) -> float:
        """`SurrogateInputs.center`, of the tokens of a whole minibatch; 0 where nothing is centred."""
        return 0.0

    def corrected(self, correction: Correction) -> Correction:
        """The configured correction, with the weights and rules that are the objective's own."""
        return correction

    def one_ratio_per_response(self, level: str | None) -> bool:
        """Whether the estimator weights whole responses (DVP, eq. 22), given `correction.level`."""
        return self.sequence_ratio or level in ("sequence", "geometric")

    def default_pruning(self, level: str | None) -> PruningLevel:
        """Return the value of `dvp_outside` that null stands for, if min-p is the only truncation.

        The estimator that drops whole responses is defined for dynamic vocabulary pruning only: `dvp_rho` cuts the
        same relative tail on both sides. Plain min-p, top-p and top-k sampling gets `token`.

        Args:
            level: `correction.level`.
        """
        return "response" if self.dvp_rho is not None and self.one_ratio_per_response(level) else "token"

    def faults_in(self, config: Config) -> Iterator[Fault]:
        """What of the other sections does not go with this objective."""
        yield from ()

    def faults(self) -> Iterator[Fault]:
        if self.kl_estimator is not None and self.kl_coef == 0:
            yield Fault(("kl_estimator",), self.kl_estimator, "has no effect with kl_coef 0; set objective.kl_coef")

    def resolved(self) -> dict[str, Any]:
        return {"kl_estimator": "k3"} if self.kl_coef > 0 and self.kl_estimator is None else {}


class RatioObjective(ObjectiveConfig):
    """An objective that clips or gates a ratio, which `ratio` chooses."""

    ratio: RatioKind | None = Field(
        None,
        description="train: learner now over learner at the snapshot; rollout: learner now over the sampler (bypass); "
        "shadow: the sampler's arithmetic now over the sampler, with the learner's gradient; one: 1. null: that of "
        "correction.preset, or train.",
    )

    @property
    def ratio_kind(self) -> RatioKind:
        return self.ratio or "train"
