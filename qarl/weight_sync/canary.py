"""The canary: fixed token sequences whose log-probs the sampler must reproduce after every publish.

Digests prove that bytes arrived. The canary proves that the sampler computes with them: the sampler scores it, and so
does the policy's own forward in the sampler's arithmetic. If the two use other kernels, their log-probs differ by
rounding, and the size of this difference stays the same while the weights change. So the first load, from a checkpoint,
sets the bound. Log-probs are natural logarithms at temperature 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice

from qarl.weight_sync.fingerprints import PublishError

SEQUENCES, TOKENS = 2, 64  # scored at every publish
FACTOR = 4.0  # allowed ratio of a later mean to the first; a healthy run reached 2.6, with both means small
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


class CanaryCheck:
    """Compares the canary's log-probs of sampler and policy after every publish. The first comparison sets the bound.

    Only the mean is bounded, because the maximum has a long tail: 0.66 was seen after 57 healthy steps that began at
    0.16.

    Args:
        exact: The sampler promises bit-identical log-probs. If the first ones are, all later ones must be.
        say: Called with one line for the user if a promise of equal bits is not kept.

    Attributes:
        bound: Largest mean difference allowed, in nats; None before the first comparison.
    """

    def __init__(self, exact: bool, say: Callable[[str], None]) -> None:
        self._exact, self._say = exact, say
        self.bound: float | None = None

    def compare(self, version: int, sampler: Sequence[Sequence[float]], policy: Sequence[float]) -> dict[str, float]:
        """Compare the log-probs at a policy version, and return the metrics.

        Args:
            version: Policy version.
            sampler: The sampler's log-probs per token sequence, in nats.
                policy: The same log-probs from the policy's own forward, concatenated over sequences.

        Raises:
            PublishError: The sampler computes another model, or not with the weights that it was sent.
        """
        found = difference(list(chain.from_iterable(sampler)), policy)
        if self.bound is None:
            self.bound = self._first_bound(found)
        elif found.mean > self.bound:
            raise PublishError(
                f"publish of version {version}: vLLM's log-probs on the canary are off by {found}, above the "
                f"mean of {self.bound:.4f} that the first load allows: vLLM does not use the weights that it was sent"
            )
        return {"publish/canary_abs_mean": found.mean, "publish/canary_abs_max": found.max}

    def _first_bound(self, first: Difference) -> float:
        if first.mean > BROKEN:
            raise PublishError(
                f"rollout: vLLM's log-probs of the initial policy are off by {first} on the canary, so vLLM does not "
                "run this model and scheme correctly; use rollout.numerics=exact, or another scheme"
            )
        if self._exact and first.max == 0.0:
            return 0.0
        if self._exact:
            self._say(
                f"rollout: the canary's log-probs differ by {first} between sampler and learner, and should be "
                "bit-identical; run qarl verify-exact to find out where they differ"
            )
        return min(BROKEN, max(FLOOR, FACTOR * first.mean))


def canary_of(prompts: Sequence[Sequence[int]], limit: int) -> list[list[int]]:
    """Return the first `SEQUENCES` distinct prompts of at least two tokens, cut to `TOKENS`.

    If all prompts have one token, they are joined to one sequence. The result is empty if the context (`limit`, in
    tokens) has only two tokens, because a response needs one of them.
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
