"""The policy as a rollout engine gets it: the sampler's forward on one published version, and no masters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from qarl_formats.prepared import PreparedWeight
from qarl_kernels.logprob import Truncation, logits_of, token_logprobs
from torch import Tensor, nn

from qarl.policy.attention import AttentionContext, learner_context
from qarl.policy.view import Role, View
from qarl.weight_sync.layout import ModelLayout
from qarl.weight_sync.snapshot import Snapshot
from qarl.weight_sync.verify import PublishError

SCORE_CHUNK = 128  # rows of logits that `score` holds at once
HEAD_ROWS = 256  # of the output layer, compared at once


def final_states(model: nn.Module, ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
    """Final hidden states of a packed batch, of whoever's forward is running.

    model: the policy's, without its output layer. ids, positions: (T,) int64. Returns (T, H) of the compute dtype.
    """
    output = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, qarl_context=context)
    return output.last_hidden_state[0]


class Sampler:
    """Runs one version of a policy in the sampler's arithmetic, and shows what it multiplies with.

    The policy offers each new version (`offer`); `install` takes it over, and a publish proves `held` against it.
    layout: of the model. head: the name of the output layer's weight. view: what the forward reads.
    """

    view: View

    def __init__(self, layout: ModelLayout, model: nn.Module, role: Role, head: str, kernels: bool) -> None:
        self.layout, self._model, self._role, self._head, self._kernels = layout, model, role, head, kernels
        self._offered: tuple[Snapshot, Callable[[], View]] | None = None
        self._installed: Snapshot | None = None

    def offer(self, snapshot: Snapshot, view: Callable[[], View]) -> None:
        """`snapshot` is the policy's current one from now on. view: makes what the sampler's forward reads of it."""
        self._offered = snapshot, view

    @property
    def newest(self) -> int:
        """The policy version that was offered last."""
        assert self._offered is not None, "no version was offered"
        return self._offered[0].version

    @property
    def current(self) -> bool:
        """Whether the forward runs on what was offered last."""
        return self._offered is not None and self._installed is self._offered[0]

    def install(self, snapshot: Snapshot) -> None:
        """Point the forward at `snapshot`. An aligned learner reads the same operands already.

        Raises PublishError unless the snapshot was offered last: what is published is what was learned last.
        """
        assert self._offered is not None, "no version was offered"
        offered, view = self._offered
        if snapshot is not offered:
            raise PublishError(
                f"publish of version {snapshot.version}: the learner is at version {offered.version}; "
                "publish the current snapshot"
            )
        self.view, self._installed = view(), snapshot

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Every published tensor that the forward multiplies with, by name, read back from the form that it reads.

        Raises PublishError where that form is not, bit for bit, what the tensor is prepared to.
        """
        for name, weight in self.view.operands.items():
            assert isinstance(weight, PreparedWeight), f"{name}: the sampler multiplies what is published"
            try:
                tensors = weight.held()
            except ValueError as error:
                raise self._refusal(f"{name}: {error}") from error
            yield from ((f"{name}.{suffix}", tensor) for suffix, tensor in tensors.items())
        for name, value in self.view.values.items():
            if name == self._head and not self._multiplies(value):
                raise self._refusal(f"{name}: the output layer multiplies with other values")
            yield name, value

    def _refusal(self, what: str) -> PublishError:
        assert self._installed is not None, "no version was installed"
        return PublishError(f"publish of version {self._installed.version}: {what}")

    def _multiplies(self, value: Tensor) -> bool:
        """Whether the output layer's weight is `value`, which on the CPU it holds in float32."""
        blocks = zip(self.view.head.split(HEAD_ROWS), value.split(HEAD_ROWS), strict=True)
        return self.view.head is value or all(torch.equal(head, rows.to(head.dtype)) for head, rows in blocks)

    # --- forwards ----------------------------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, forwards of the policy's modules run on the installed version, without gradient."""
        with self._role.as_(self.view, sampling=True), torch.no_grad():
            yield

    def hidden_states(self, ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """`final_states`, inside `running`."""
        return final_states(self._model, ids, positions, context)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits (R, V) of hidden states (R, H); no gradient."""
        return logits_of(hidden, self.view.head, self._kernels)

    @torch.no_grad()
    def score(self, sequences: list[list[int]]) -> Tensor:
        """Log-probs of every token but the first of each sequence, at temperature 1.

        sequences: token ids, two or more each. Returns (T,) float32, in nats, sequence after sequence.
        """
        device = self.layout.device
        context, positions = learner_context([(len(tokens) - 1, [0]) for tokens in sequences], device)
        ids = torch.tensor([t for tokens in sequences for t in tokens[:-1]], device=device)
        targets = torch.tensor([t for tokens in sequences for t in tokens[1:]], device=device)
        with self.running():
            hidden = self.hidden_states(ids, positions, context)
            logp, _ = token_logprobs(hidden, None, self.view.head, targets, Truncation(), SCORE_CHUNK, self._kernels)
        return logp
