"""The trust band: which ratios still give gradient.

Every clipped surrogate here is min(r A, clip(r) A) for some bounds. Written out by the sign of A it is A times the
ratio inside a band, and A times the bound it left through outside, a constant. For A > 0 only the upper bound binds,
for A < 0 the lower one, and a second upper one where there is one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from qarl.objectives.ratios import INFINITE, clamped_exp

if TYPE_CHECKING:
    from torch import Tensor

    from qarl.objectives.segments import Segments


@dataclass(frozen=True)
class Band:
    """Where a ratio still gives gradient. Bounds are inside the band.

    level: a ratio per `token`, or one per response (`sequence`: the geometric mean over its tokens).
    high: A > 0, no gradient above. low: A < 0, none below. neg_high: A < 0, none above (dual clip, tbpo).
    """

    level: Literal["token", "sequence"]
    high: float
    low: float
    neg_high: float = math.inf

    def left(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """bool: ratios outside the band of their advantage's sign; same shape, per token or per response."""
        negative = advantages < 0
        return ((advantages > 0) & (ratio > self.high)) | (negative & ((ratio < self.low) | (ratio > self.neg_high)))

    def bound(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """The ratio brought back into its band, without gradient; same shape. Defined where `left` is true."""
        ratio = ratio.detach()
        return ratio.clamp(max=self.high).where(advantages > 0, ratio.clamp(self.low, self.neg_high))

    def comparable(self, log_ratio: Tensor) -> Tensor:
        """Return the per-token log ratio, (T,), with infinite ones as 0 if the band looks at a mean over the response.

        One token outside a truncated distribution would put its whole response outside the band otherwise.
        """
        return log_ratio if self.level == "token" else log_ratio.masked_fill(log_ratio.abs() >= INFINITE, 0.0)

    def beyond(self, log_ratio: Tensor, segments: Segments) -> Tensor:
        """bool (T,): tokens outside [low, high] at this per-token log ratio (T,), whatever the sign of the advantage.

        What a count of clip bounds means; `outside` is the part of it that loses its gradient. A sequence band looks at
        the mean of the log ratio over the response.
        """
        if self.level == "token":
            ratio = clamped_exp(log_ratio)[0]
            return (ratio < self.low) | (ratio > self.high)
        ratio = clamped_exp(segments.mean(log_ratio))[0]
        return segments.expand((ratio < self.low) | (ratio > self.high))

    def outside(self, log_ratio: Tensor, advantages: Tensor, segments: Segments) -> Tensor:
        """bool (T,): tokens without gradient at this per-token log ratio (T,) and these advantages (R,).

        A sequence band looks at the mean of the log ratio over the response.
        """
        if self.level == "token":
            return self.left(clamped_exp(log_ratio)[0], segments.expand(advantages))
        return segments.expand(self.left(clamped_exp(segments.mean(log_ratio))[0], advantages))
