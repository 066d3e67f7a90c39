"""The canary: fixed token sequences whose log-probs the sampler must reproduce after every publish.

Digests prove that bytes arrived; the canary proves that the sampler computes with them. It is scored by vLLM and by the
policy's own forward of the sampler's arithmetic. How far the two may differ is set by the first, full load, which vLLM
made itself from a checkpoint: kernels, attention and rounding differ, and that difference stays of one size while the
weights change. Log-probs are natural logarithms at temperature 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice

from qarl.weight_sync.verify import PublishError

SEQUENCES, TOKENS = 2, 64  # scored at each publish
FACTOR = 4.0  # by which a later publish may exceed the first load; 2.6 was seen without a fault, where both were small
FLOOR = 0.25  # nats: below this nothing is wrong, however well the first load agreed
BROKEN = 1.0  # nats: what is this far off computes something else (a random policy is off by 5 and more)


@dataclass(frozen=True)
class Difference:
    """mean, max: of |log-prob of the sampler - that of the policy| over the canary's tokens, in nats."""

    mean: float
    max: float

    def __str__(self) -> str:
        return f"mean {self.mean:.4f}, max {self.max:.4f}"


def difference(sampler: Sequence[float], policy: Sequence[float]) -> Difference:
    """Of the log-probs of the same tokens. A value that is not finite makes both numbers infinite; none make them 0."""
    apart = [abs(a - b) for a, b in zip(sampler, policy, strict=True)]
    if not all(map(math.isfinite, apart)):
        return Difference(math.inf, math.inf)
    if not apart:
        return Difference(0.0, 0.0)
    return Difference(sum(apart) / len(apart), max(apart))


@dataclass(frozen=True)
class Bound:
    """How far the mean may be off after a publish, in nats. A single token's difference has tails too long for a bound:
    0.66 was seen after 57 healthy steps that began at 0.16."""

    mean: float

    @classmethod
    def of(cls, first: Difference, exact: bool = False) -> Bound:
        """The bound that the first, full load sets. exact: where it agreed to the bit, all later ones must.

        Raises PublishError when that load computes something else.
        """
        if first.mean > BROKEN:
            raise PublishError(
                f"rollout: vLLM's log-probs of the initial policy are off by {first} on the canary: it "
                "does not run this model and scheme right; use rollout.linear_kernels=qarl, or another "
                "scheme"
            )
        if exact and first.max == 0.0:
            return cls(0.0)
        return cls(min(BROKEN, max(FLOOR, FACTOR * first.mean)))

    def check(self, version: int, found: Difference) -> None:
        """Raise PublishError when a publish is off by more."""
        if found.mean > self.mean:
            raise PublishError(
                f"publish of version {version}: vLLM's log-probs on the canary are off by {found}, "
                f"where the first load allows a mean of {self.mean:.4f}: it does not compute with the "
                "weights that it was sent"
            )


def canary_of(prompts: Sequence[Sequence[int]], limit: int) -> list[list[int]]:
    """The first `SEQUENCES` distinct prompts of at least two tokens, cut to `TOKENS`. limit: the context in tokens.

    Where all prompts have one token, these behind one another; in a context of two tokens there is nothing to score.
    """
    chosen: list[list[int]] = []
    longest = min(TOKENS, limit - 1)
    for prompt in prompts:
        tokens = list(prompt[:longest])
        if len(tokens) > 1 and tokens not in chosen:
            chosen.append(tokens)
        if len(chosen) == SEQUENCES:
            break
    if not chosen and longest > 1:
        chosen = [list(islice(cycle(chain.from_iterable(prompts)), longest))]
    return chosen
