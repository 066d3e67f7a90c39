"""The canary: fixed token sequences whose log-probs the sampler must reproduce after every publish.

Digests prove that bytes arrived. The canary proves that the sampler computes with them: the sampler scores it, and so
does the policy's own forward in the sampler's arithmetic. The two differ because kernels and rounding differ, and that
difference keeps its size while the weights change. So the first load, which vLLM does from a checkpoint, sets the
bound. Log-probs are natural logarithms at temperature 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice

from qarl.weight_sync.fingerprints import PublishError

SEQUENCES, TOKENS = 2, 64  # scored at every publish
FACTOR = 4.0  # allowed ratio of a later mean to the first; 2.6 was measured without an error, with both means small
FLOOR = 0.25  # nats: a smaller mean is never an error, however well the first load agreed
BROKEN = 1.0  # nats: a larger mean indicates another model (a random policy differs by 5 or more)


@dataclass(frozen=True)
class Difference:
    """Mean and maximum of |sampler's log-prob - policy's log-prob| over the canary's tokens, in nats."""

    mean: float
    max: float

    def __str__(self) -> str:
        return f"mean {self.mean:.4f}, max {self.max:.4f}"


def difference(sampler: Sequence[float], policy: Sequence[float]) -> Difference:
    """Compare log-probs of the same tokens. Infinite if any value is not finite, 0 if there are no tokens."""
    apart = [abs(a - b) for a, b in zip(sampler, policy, strict=True)]
    if not all(map(math.isfinite, apart)):
        return Difference(math.inf, math.inf)
    if not apart:
        return Difference(0.0, 0.0)
    return Difference(sum(apart) / len(apart), max(apart))


@dataclass(frozen=True)
class Bound:
    """Largest mean difference allowed after a publish, in nats.

    The maximum is not bounded because its tail is long: 0.66 was seen after 57 healthy steps that began at 0.16.
    """

    mean: float

    @classmethod
    def of(cls, first: Difference, exact: bool = False) -> Bound:
        """Return the bound that the first load sets. exact: if it was bit-identical, all later ones must be.

        Raises PublishError if the sampler computes another model.
        """
        if first.mean > BROKEN:
            raise PublishError(
                f"rollout: vLLM's log-probs of the initial policy are off by {first} on the canary: it "
                "does not run this model and scheme right; use rollout.numerics=exact, or another "
                "scheme"
            )
        if exact and first.max == 0.0:
            return cls(0.0)
        return cls(min(BROKEN, max(FLOOR, FACTOR * first.mean)))

    def check(self, version: int, found: Difference) -> None:
        """Raise PublishError if the mean exceeds the bound."""
        if found.mean > self.mean:
            raise PublishError(
                f"publish of version {version}: vLLM's log-probs on the canary are off by {found}, "
                f"where the first load allows a mean of {self.mean:.4f}: it does not compute with the "
                "weights that it was sent"
            )


def canary_of(prompts: Sequence[Sequence[int]], limit: int) -> list[list[int]]:
    """Return the first `SEQUENCES` distinct prompts of at least two tokens, cut to `TOKENS`.

    Prompts of one token are joined to one sequence. A context (`limit`, in tokens) of two tokens has nothing to score.
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
