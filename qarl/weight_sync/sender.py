"""The learner's side of weight sync: what a sampler holds, what of a new version travels to it, and the proof.

A sampler starts from a checkpoint of a snapshot (`prepare`, `accept`) and gets each later one as a weight
update (`send`). Fingerprints prove the bytes on the sampler's side; the canary is scored on both sides and compared
here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qarl.weight_sync.canary import Bound, Difference, difference
from qarl.weight_sync.carriers import Carrier
from qarl.weight_sync.checkpoint import write_snapshot_checkpoint
from qarl.weight_sync.fingerprints import Fingerprint
from qarl.weight_sync.layout import ModelLayout
from qarl.weight_sync.link import Link, SamplerFault
from qarl.weight_sync.plan import UpdatePlan, flatten, plan_update, unflatten
from qarl.weight_sync.snapshot import Snapshot
from qarl.weight_sync.transport import TeamCarrier
from qarl.weight_sync.update import WeightUpdate
from qarl.weight_sync.verify import PublishError

Mode = Literal["full", "delta"]


class Scorer(Protocol):
    """What computes the canary on the learner's side, in the sampler's arithmetic."""

    def install(self, snapshot: Snapshot) -> None:
        """Compute with this snapshot from now on. Raises PublishError unless it is the policy's current one."""

    def score(self, sequences: list[list[int]]) -> Tensor:
        """Log-probs of every token but the first of each sequence, at temperature 1: (T,), in nats."""


@dataclass
class _Held:
    """What the sampler holds: the snapshot whose fingerprints it proved. tensors: for delta updates only."""

    prints: Mapping[str, Fingerprint]
    tensors: dict[str, Tensor] | None

    @classmethod
    def of(cls, snapshot: Snapshot, mode: Mode) -> _Held:
        return cls(snapshot.fingerprints(), snapshot.published if mode == "delta" else None)


class WeightSender:
    """Keeps one sampler at a time at the policy's version.

    layout, tokenizer: of the model, for the checkpoint that a sampler starts from. scorer: computes the canary here.
    canary: token sequences of two tokens or more. say: gets one line about what the user should know.
    exact: the sampler promises the policy's own log-probs, bit for bit.
    metrics: of the last update, by metric name.
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
        self._exact = exact
        self.metrics: dict[str, float] = {}
        self._carrier: Carrier | TeamCarrier | None = None
        self._held: _Held | None = None
        self._bound: Bound | None = None
        self._scored: list[float] = []  # the canary, of what was prepared last

    @property
    def holds(self) -> bool:
        """Whether the sampler is known to hold a version."""
        return self._held is not None

    @property
    def started(self) -> bool:
        """Whether a sampler ever held one."""
        return self._bound is not None

    def prepare(self, directory: Path, snapshot: Snapshot) -> None:
        """What can be done before a sampler starts from `snapshot`, which the scorer has: write what it starts from to
        the new directory, and score the canary. Raises UserError as `write_snapshot_checkpoint`."""
        write_snapshot_checkpoint(directory, snapshot, self.layout, self.tokenizer)
        self._scored = self.scorer.score(self.canary).tolist()

    def use(self, carrier: Carrier | TeamCarrier) -> None:
        """The way of later updates to a process of its own; `close` closes it too."""
        self._carrier = carrier

    def accept(self, link: Link, snapshot: Snapshot, mode: Mode) -> None:
        """Note that a sampler has started from what was prepared; the first one's canary sets the bound of all others.

        mode: of the next update. Raises PublishError where it computes something else.
        """
        scored = _joined(link.call("score", self.canary, _ignore))
        found = difference(scored, self._scored)
        bound = Bound.of(found, self._exact)
        if self._bound is None:
            self._bound = bound
            if self._exact and found.max:
                self.say(
                    f"rollout.numerics: the canary's log-probs are off by {found}, and should be the policy's to the "
                    "bit; qarl verify-exact finds out where"
                )
            for note in link.facts["notes"]:
                self.say(note)
        else:
            self._bound.check(snapshot.version, found)
        self._measure(link, found, None)
        self._held = _Held.of(snapshot, mode)

    def send(self, link: Link, snapshot: Snapshot, mode: Mode) -> None:
        """Bring a sampler to `snapshot`. What it refuses is sent once more whole.

        Raises PublishError: the whole snapshot was refused, and what the sampler holds is unknown.
        """
        try:
            self._send(link, snapshot, mode)
        except PublishError as error:
            if mode == "full":
                raise
            self.say(f"{error}; sending everything")
            self._send(link, snapshot, "full")
        self._held = _Held.of(snapshot, mode)

    def forget(self) -> None:
        """The sampler holds nothing any more: the next update is whole."""
        self._held = None

    def close(self) -> None:
        """The sampler is gone. Takes back what one in the middle of an update never released."""
        if self._carrier is not None:
            self._carrier.close()
        self._carrier = self._held = None

    def _send(self, link: Link, snapshot: Snapshot, mode: Mode) -> None:
        assert self._bound is not None, "an update before the first load"
        prints = snapshot.fingerprints()
        held, self._held = self._held, None
        known, values = (None, None) if held is None else (held.prints, held.tensors)
        plan = plan_update(snapshot.published, prints, known, values, mode)
        found = self._carry(link, plan, snapshot)
        self._bound.check(snapshot.version, found)
        self._measure(link, found, plan)

    def _carry(self, link: Link, plan: UpdatePlan, snapshot: Snapshot) -> Difference:
        """Send, and score the canary on both sides: the policy's side while the sampler loads."""
        tensors = flatten(plan)
        carrier = self._carrier
        # In one process what is published is handed over as it is.
        content = list(unflatten(tensors.items())) if carrier is None else carrier.pack(tensors)
        try:
            link.begin("publish", WeightUpdate(snapshot.version, content, snapshot.fingerprints(), self.canary))
            expected = self.scorer.score(self.canary).tolist()
            seconds, scored = link.finish(_ignore)
            self.metrics |= {f"time/publish_{part}_s": value for part, value in seconds.items()}
            return difference(_joined(scored), expected)
        except SamplerFault:
            carrier = None  # closed with the sampler, it takes back what that one never released
            raise
        finally:
            if carrier is not None:
                carrier.release()

    def _measure(self, link: Link, found: Difference, plan: UpdatePlan | None) -> None:
        self.metrics |= {"publish/canary_abs_mean": found.mean, "publish/canary_abs_max": found.max}
        if plan is not None:
            self.metrics["publish/sent_mib"] = plan.nbytes / 2**20
            self.metrics["publish/sent_frac"] = plan.nbytes / plan.full_nbytes
        self.metrics["publish/proved_frac"] = link.facts["proved_frac"]


def _ignore(responses: int, tokens: int) -> None:
    """A sampler that loads draws nothing."""


def _joined(scores: list[list[float]]) -> list[float]:
    return [logprob for sequence in scores for logprob in sequence]
