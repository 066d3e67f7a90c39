"""The interface of a started sampler that the weight sender uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from qarl.weight_sync.transport import Transport


class SamplerFault(Exception):
    """A sampler failed, hung or died. The message is one line that says how."""


class Connection(Protocol):
    """Sends requests to a sampler and returns their results. Every method raises SamplerFault if the sampler fails.

    capabilities: reported when the sampler was ready: `proved_frac` (fraction of a snapshot's bytes that fingerprints
    prove), `notes` (lines for the user), `phases` (seconds per part of its start).
    transports: one per process of the sampler; none in the learner's process.
    """

    capabilities: dict[str, Any]
    transports: Sequence[Transport]

    def begin(self, operation: str, payload: Any) -> None:
        """Send a request: `publish` with a `WeightUpdate`."""

    def finish(self, tick: Callable[[int, int], None]) -> Any:
        """Wait for the result of a publish: (seconds by part, log-probs of the canary per sequence).

        Raises PublishError if the sampler does not hold what was sent.
        """

    def call(self, operation: str, payload: Any, tick: Callable[[int, int], None]) -> Any:
        """`begin` and `finish`: `score` with token sequences returns their log-probs per sequence."""
