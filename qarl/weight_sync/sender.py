"""The learner's side of weight sync: sends each policy version to a sampler and checks that it computes with it.

A sampler starts from a checkpoint of a snapshot (`prepare`, `accept`) and gets every later version as an update
(`send`). The sampler compares fingerprints of what it holds. The canary is scored on both sides and compared here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qarl.weight_sync.canary import CanaryCheck
from qarl.weight_sync.checkpoint import write_snapshot_checkpoint
from qarl.weight_sync.fingerprints import PublishError
from qarl.weight_sync.snapshot import ModelLayout, Snapshot
from qarl.weight_sync.transport import Transport
from qarl.weight_sync.update import Prints, WeightUpdate, delta


class SamplerFault(Exception):
    """A sampler failed, hung or died. The message is one line that says how."""


class Connection(Protocol):
    """Sends requests to a sampler and returns their results. Every method raises SamplerFault if the sampler fails.

    Attributes:
        capabilities: What the sampler reported when it was ready: `proved_frac` (fraction of a snapshot's bytes that
            fingerprints prove), `notes` (lines for the user), `phases` (seconds per part of its start).
        transports: One per process of the sampler; empty if it runs in the learner's process.
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


Mode = Literal["full", "delta"]


class Scorer(Protocol):
    """Computes the canary on the learner's side, in the sampler's arithmetic."""

    def install(self, snapshot: Snapshot) -> None:
        """Use this snapshot from now on. Raises PublishError unless it is the policy's current one."""

    def score(self, sequences: list[list[int]]) -> Tensor:
        """Return log-probs (T,) in nats, at temperature 1, of every token but the first of each sequence."""


class WeightSender:
    """Keeps one sampler at a time at the policy's version.

    Args:
        layout: Layout of the model, for the checkpoint that a sampler starts from.
        tokenizer: Tokenizer for the same checkpoint.
        scorer: Computes the canary on this side.
        canary: Token sequences of at least two tokens each.
        say: Called with one-line messages for the user.
        exact: Whether the sampler promises log-probs that are bit-identical to the policy's.

    Attributes:
        holds: Whether the sampler is known to hold a version.
        metrics: Metrics of the last update, by name.
    """

    def __init__(
        self,
        layout: ModelLayout,
        tokenizer: PreTrainedTokenizerBase,
        scorer: Scorer,
        canary: list[list[int]],
        say: Callable[[str], None],
        exact: bool = False,
    ) -> None:
        self.layout, self.tokenizer, self.scorer, self.canary, self.say = layout, tokenizer, scorer, canary, say
        self._check = CanaryCheck(exact, say)
        self.holds = False
        self.metrics: dict[str, float] = {}
        self._previous: tuple[Mapping[str, Tensor], Prints] | None = None  # what the next delta is relative to
        self._scored: list[float] = []  # the canary, scored by `prepare`

    @property
    def started(self) -> bool:
        """Whether a sampler ever held a version."""
        return self._check.bound is not None

    def prepare(self, directory: Path, snapshot: Snapshot) -> None:
        """Write the checkpoint that a sampler will start from to a new directory, and score the canary.

        Raises UserError if the checkpoint cannot be written.
        """
        write_snapshot_checkpoint(directory, snapshot, self.layout, self.tokenizer)
        self._scored = self.scorer.score(self.canary).tolist()

    def accept(self, connection: Connection, snapshot: Snapshot, mode: Mode) -> None:
        """Register a sampler that started from the prepared checkpoint. The first one's canary sets the bound.

        mode: Mode of the next update; delta keeps a reference to the snapshot. Raises PublishError if the sampler's
        log-probs are too far off.
        """
        scored, first = connection.call("score", self.canary, _ignore), not self.started
        self._compare(connection, snapshot, scored, self._scored)
        for note in connection.capabilities["notes"] if first else ():
            self.say(note)
        self._keep(snapshot, mode)

    def send(self, connection: Connection, snapshot: Snapshot, mode: Mode) -> None:
        """Update a sampler to `snapshot`. A delta that it rejects is sent again as a full update.

        Raises PublishError if a full update is rejected. The sampler's weights are undefined then.
        """
        try:
            self._send(connection, snapshot, mode)
        except PublishError as error:
            if mode == "full":
                raise
            self.say(f"{error}; sending everything")
            self._send(connection, snapshot, "full")
        self._keep(snapshot, mode)

    def forget(self) -> None:
        """Note that the sampler is gone or holds nothing any more, so that the next update is full."""
        self.holds, self._previous = False, None

    def _keep(self, snapshot: Snapshot, mode: Mode) -> None:
        self.holds = True
        self._previous = (snapshot.published, snapshot.fingerprints) if mode == "delta" else None

    def _send(self, connection: Connection, snapshot: Snapshot, mode: Mode) -> None:
        assert self.started, "an update before the first load"
        previous = self._previous
        self.forget()
        tensors = snapshot.published
        if mode == "delta" and previous is not None:
            tensors = delta(tensors, snapshot.fingerprints, *previous)
        self._compare(connection, snapshot, *self._transfer(connection, tensors, snapshot))
        sent, whole = (sum(t.nbytes for t in group.values()) for group in (tensors, snapshot.published))
        self.metrics |= {"publish/sent_mib": sent / 2**20, "publish/sent_frac": sent / whole}

    def _transfer(
        self, connection: Connection, tensors: Mapping[str, Tensor], snapshot: Snapshot
    ) -> tuple[Any, list[float]]:
        """Send tensors, and score the canary on both sides: on this side while the sampler loads.

        Returns:
            The sampler's log-probs per sequence, and those of this side.
        """
        transports = connection.transports
        payloads: list[Any] = [transport.pack(tensors) for transport in transports] or [list(tensors.items())]
        try:
            connection.begin("publish", WeightUpdate(snapshot.version, payloads, snapshot.fingerprints, self.canary))
            expected = self.scorer.score(self.canary).tolist()
            seconds, scored = connection.finish(_ignore)
            self.metrics |= {f"time/publish_{part}_s": value for part, value in seconds.items()}
            return scored, expected
        except SamplerFault:
            transports = ()  # closing the failed sampler frees what was packed for it
            raise
        finally:
            for transport in transports:
                transport.release()

    def _compare(self, connection: Connection, snapshot: Snapshot, scored: Any, expected: list[float]) -> None:
        self.metrics |= self._check.compare(snapshot.version, scored, expected)
        self.metrics["publish/proved_frac"] = connection.capabilities["proved_frac"]


def _ignore(responses: int, tokens: int) -> None:
    """Ignore progress, which only generation reports."""
