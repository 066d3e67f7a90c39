"""The sampler's forward on one published version, without masters. Rollout engines use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from qarl_formats.bits import Proof, same_bits
from qarl_formats.weight import LowBitWeight
from qarl_kernels.logprob import Distribution, Truncation, distribution, logits_of, token_logprobs
from torch import Tensor

from qarl.policy.attention import Attention, packed, paged
from qarl.policy.decoder import Decoder
from qarl.policy.linear import Part, WeightSet
from qarl.policy.pages import Caches, Span
from qarl.policy.routes import NO_ROUTES, ExpertLayer, Routes
from qarl.policy.trace import Tracer
from qarl.weight_sync.fingerprints import PublishError
from qarl.weight_sync.snapshot import ModelLayout, Snapshot

SCORE_CHUNK = 128  # rows of logits that `score` holds at once
HEAD_ROWS = 256  # rows of the output layer compared at once


class Sampler:
    """Runs one published version of a policy, without its masters, and reads its tensors back for verification.

    The policy offers each new version with `offer`. A publish calls `install`, and compares `held` with the snapshot.

    Attributes:
        layout: Shapes, scheme and dtype of the model.
        weights: Weight set of the forward.
        tracer: Records the result of every operation; the engine announces the rows that run next. None: no recording.
    """

    weights: WeightSet
    tracer: Tracer | None = None

    def __init__(self, layout: ModelLayout, decoder: Decoder, head: str, kernels: bool) -> None:
        self.layout, self._decoder, self._head, self._kernels = layout, decoder, head, kernels
        self._offered: tuple[Snapshot, Callable[[], WeightSet]] | None = None
        self._installed: Snapshot | None = None

    def offer(self, snapshot: Snapshot, weights: Callable[[], WeightSet]) -> None:
        """Announce the policy's current snapshot. weights: creates the sampler's weight set from it."""
        self._offered = snapshot, weights

    @property
    def experts(self) -> list[ExpertLayer]:
        """The mixtures of experts, by layer."""
        return [layer.experts for layer in self._decoder.layers if layer.experts is not None]

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype of the KV cache."""
        return self.weights.cache_dtype(self.layout.dtype)

    @property
    def newest(self) -> int:
        """The last offered policy version."""
        assert self._offered is not None, "no version was offered"
        return self._offered[0].version

    @property
    def current(self) -> bool:
        """Whether the forward runs on the last offered version."""
        return self._offered is not None and self._installed is self._offered[0]

    def install(self, snapshot: Snapshot) -> None:
        """Make the forward read `snapshot`. Copies nothing if the learner is aligned: it shares the weights.

        Raises:
            PublishError: The snapshot is not the one that was offered last.
        """
        assert self._offered is not None, "no version was offered"
        offered, weights = self._offered
        if snapshot is not offered:
            raise PublishError(
                f"publish of version {snapshot.version}: the learner is at version {offered.version}; "
                "publish the current snapshot"
            )
        self.weights, self._installed = weights(), snapshot

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every published tensor by name, read back from the weights that the forward multiplies with.

        Raises:
            PublishError: After the last tensor, if preparing the yielded tensors would give other weights in any bit.
        """
        proof = Proof()
        for linear, parts in self.weights.linears.items():
            widths = dict(zip(linear.names, linear.widths, strict=True))
            for part in parts:
                yield from self._stored(part, widths, proof)
        for name, value in self.weights.values.items():
            if name == self._head and not self._is_head(value):
                raise self._refusal(f"{name}: the output layer multiplies with other values")
            yield name, value
        try:
            proof.settle()
        except ValueError as error:
            raise self._refusal(str(error)) from error

    def _stored(self, part: Part, widths: Mapping[str, int], proof: Proof) -> Iterator[tuple[str, Tensor]]:
        """The published tensors of a part: the snapshot's own if the tensors read back equal them bit for bit."""
        assert self._installed is not None, "no version was installed"
        stored = part.weight.stored(proof.of(f"{', '.join(part.names)}: "))
        group = self._installed.groups.get(part.names)
        if group is not None and _same(group.tensors, stored):
            keys = [f"{name}.{suffix}" for name in part.names for suffix in stored]
            yield from ((key, self._installed.tensors[key]) for key in keys)
            return
        whole = LowBitWeight(part.weight.scheme, stored, part.weight.shape)
        for name, own in zip(part.names, whole.split([widths[name] for name in part.names]), strict=True):
            yield from ((f"{name}.{suffix}", tensor) for suffix, tensor in own.tensors.items())

    def _refusal(self, what: str) -> PublishError:
        assert self._installed is not None, "no version was installed"
        return PublishError(f"publish of version {self._installed.version}: {what}")

    def _is_head(self, value: Tensor) -> bool:
        """Whether the output layer multiplies with `value`, which it holds in float32 on the CPU."""
        blocks = zip(self.weights.head.split(HEAD_ROWS), value.split(HEAD_ROWS), strict=True)
        return self.weights.head is value or all(torch.equal(head, rows.to(head.dtype)) for head, rows in blocks)

    # --- forwards ----------------------------------------------------------------------------------------------

    @contextmanager
    def traced(self, tracer: Tracer) -> Iterator[None]:
        """Context manager: `tracer` records forwards, and the engine runs without CUDA graphs."""
        self.tracer = tracer
        try:
            with self._decoder.noting(tracer):
                yield
        finally:
            self.tracer = None

    def paged(self, spans: list[Span], caches: Caches) -> Attention:
        """Attention of a forward over the KV cache."""
        return paged(spans, self.layout.device, caches, self.weights.fused)

    @torch.no_grad()
    def hidden_states(self, ids: Tensor, attention: Attention, routes: Routes = NO_ROUTES) -> Tensor:
        """Return the final hidden states (T, H) of a packed batch. ids: (T,) int64."""
        return self._decoder(ids, attention, self.weights, None, routes)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the float32 logits (R, V) of hidden states (R, H); no gradient."""
        return logits_of(hidden, self.weights.head, self._kernels)

    @torch.no_grad()
    def distribution(self, hidden: Tensor, truncation: Truncation) -> Distribution:
        """The distribution of the tokens that follow states (R, H), with the learner's log-probs."""
        return distribution(hidden, self.weights.head, truncation, self._kernels)

    @torch.no_grad()
    def logprobs(self, hidden: Tensor, tokens: Tensor, truncation: Truncation) -> Tensor:
        """Return log-probs (R,) in nats of the tokens (R,) that follow states (R, H), by the learner's function."""
        return token_logprobs(hidden, None, self.weights.head, tokens, truncation, SCORE_CHUNK, self._kernels)[0]

    @torch.no_grad()
    def score(self, sequences: list[list[int]]) -> Tensor:
        """Return log-probs of every token except the first of each sequence, at temperature 1.

        sequences: token ids, two or more each. Returns (T,) float32, in nats, sequence after sequence.
        """
        if not sequences:
            return torch.empty(0, device=self.layout.device)
        targets = torch.tensor([t for tokens in sequences for t in tokens[1:]], device=self.layout.device)
        return self.logprobs(self.states([tokens[:-1] for tokens in sequences]), targets, Truncation())

    @torch.no_grad()
    def states(self, sequences: list[list[int]]) -> Tensor:
        """Final hidden states (T, H) of whole sequences of token ids, one after the other."""
        device = self.layout.device
        attention = packed([(len(tokens), [0]) for tokens in sequences], device, self.weights.fused)
        return self.hidden_states(torch.tensor([t for tokens in sequences for t in tokens], device=device), attention)


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(same_bits(tensor, other[suffix]) for suffix, tensor in one.items())
