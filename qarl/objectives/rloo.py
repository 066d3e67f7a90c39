"""RLOO, REINFORCE leave-one-out (Ahmadian et al. 2024): the baseline is the mean of the group's other responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from qarl.config.base import Fault, Field
from qarl.objectives.base import AdvantageKey
from qarl.objectives.reinforce import Reinforce


class RLOO(Reinforce):
    """The policy gradient, with leave-one-out advantages."""

    name: Literal["rloo"] = Field("rloo", description="reinforce with leave-one-out advantages (Ahmadian et al. 2024).")
    advantage: AdvantageKey = "rloo"

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        if self.advantage != "rloo":
            text = "rloo is reinforce with advantage rloo; leave null, or use reinforce"
            yield Fault(("advantage",), self.advantage, text)
