"""A started sampler as weight sync talks to it, whichever engine it is and wherever it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class SamplerFault(Exception):
    """A sampler did not do what it was asked to. The message says what happened, in one line."""


class Link(Protocol):
    """The way of orders to a sampler and of results back. A sampler that fails raises SamplerFault.

    facts: what it said of itself when it was ready: `proved_frac` (share of a snapshot's bytes whose arrival
    its fingerprints prove), `notes` (lines for the user).
    """

    facts: dict[str, Any]

    def begin(self, operation: str, payload: Any) -> None:
        """Give an order: `publish` with a `WeightUpdate`."""

    def finish(self, tick: Callable[[int, int], None]) -> Any:
        """Wait for its result: seconds of its parts by name, and the canary's log-probs by sequence.

        Raises PublishError where what the sampler holds is not what was sent.
        """

    def call(self, operation: str, payload: Any, tick: Callable[[int, int], None]) -> Any:
        """Both at once: `score` with token sequences gives the log-probs by sequence."""
