"""A watcher of one training step: the costly diagnostics that are due in it, and the tokens for its plots.

It runs forwards and backwards of its own beside the learner's, and leaves gradients, weights, optimizer and objective
as they are: a run has the same bits with and without.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Set
from contextlib import contextmanager

import torch
from qarl_kernels.logprob import Truncation
from torch import Tensor

from qarl.config import Config
from qarl.config.diagnostics import Costly
from qarl.diagnostics.gradients import gradient_metrics
from qarl.diagnostics.precision import deployed_metrics, precision_metrics
from qarl.diagnostics.record import StepTokens
from qarl.objectives import Objective, Segments, TokenLogProbs
from qarl.policy.policy import Policy
from qarl.training.batch import Batch, micro_batches
from qarl.training.four_passes import gradient_gram

CPU = torch.device("cpu")


class Probe:
    """Watches one step of a `Learner`, which calls `begin`, then for each optimizer step `minibatch` and, for each of
    its training forwards, `forward`, and `end`.

    due: the costly diagnostics of the step (`DiagnosticsConfig.due`). record: keep what `tokens` gives.
    stop_token_ids: token ids that end a response, which precision/* tells apart.
    metrics: filled by `end`: precision/*, deployed/* and gradients/*. seconds: what the probe took.
    """

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        config: Config,
        truncation: Truncation,
        due: Collection[Costly],
        record: bool,
        stop_token_ids: Set[int] = frozenset(),
    ) -> None:
        self.policy, self.objective, self.config, self.truncation = policy, objective, config, truncation
        self.due, self.record, self.stop_token_ids = due, record, stop_token_ids
        self.metrics: dict[str, float] = {}
        self.seconds = 0.0
        self._passes: list[list[int]] = []  # the responses of each optimizer step
        # Of each training forward over a response, by (optimizer step, response), and columns of TokenLogProbs.
        self._logp: dict[tuple[int, int], Tensor] = {}
        self._shadow: dict[tuple[int, int], Tensor] = {}
        self._log_ratio: dict[tuple[int, int], Tensor] = {}
        self._weights: dict[int, Tensor] = {}

    def begin(self, batch: Batch) -> None:
        """Before the first optimizer step: the policy is the rollout's snapshot."""
        self._version = self.policy.version
        self._before: Tensor | None = None
        if "deployed" in self.due and not self.policy.aligned:
            with self._timed():
                self._before = self._shadow_of_all(batch)

    def minibatch(self, indices: list[int], batch: Batch) -> None:
        """Before an optimizer step on these responses."""
        self._passes.append(indices)
        if "gradients" in self.due and len(self._passes) == 1:
            with self._timed():
                train = self.config.train
                parts = micro_batches(batch, [i for i in indices if batch.advantages[i] != 0], train.micro_batch_tokens)
                tokens = sum(len(batch.responses[i]) for i in indices)
                gram = gradient_gram(
                    self.policy,
                    batch,
                    parts,
                    tokens,
                    self.truncation,
                    train.logprob_chunk,
                    self.config.loss_scale,
                    self.objective.band,
                )
                self.metrics |= gradient_metrics(gram)

    @torch.no_grad()
    def forward(self, part: list[int], batch: Batch, logps: TokenLogProbs, segments: Segments) -> None:
        """After a training forward over the responses of `part`."""
        shadow = "shadow" in self.due
        if not (shadow or self.record):
            return
        with self._timed():
            step = len(self._passes) - 1
            keys = [(step, i) for i in part]
            self._logp |= zip(keys, batch.split(logps.logp, part), strict=True)
            self._log_ratio |= zip(keys, batch.split(self.objective.log_ratio(logps, segments), part), strict=True)
            if shadow:
                found = self._shadow_at(part, batch, logps)
                self._shadow |= zip(keys, batch.split(found, part), strict=True)
            if self.record and (weights := self.objective.weights(logps, segments)) is not None:
                self._weights |= zip(part, batch.split(weights, part), strict=True)

    def end(self, batch: Batch) -> None:
        """After the last optimizer step; `batch.logp_old` is complete."""
        with self._timed():
            if "shadow" in self.due:
                self.metrics |= self._precision(batch)
            if "deployed" in self.due:
                self.metrics |= self._deployed(batch)

    def tokens(self, batch: Batch) -> StepTokens:
        """The step's tokens, each at the learner's last training forward over it; on the CPU, by response."""
        everything = list(range(len(batch)))
        last = {i: step for step, indices in enumerate(self._passes) for i in indices}
        keys = [(last[i], i) for i in everything]
        return StepTokens(
            logp_sampler=batch.packed(batch.logp_sampler, everything, CPU),
            logp_old=batch.packed(batch.logp_old, everything, CPU),
            logp=torch.cat([self._logp[key] for key in keys]),
            logp_shadow=torch.cat([self._shadow[key] for key in keys]) if self._shadow else None,
            log_ratio=torch.cat([self._log_ratio[key] for key in keys]),
            weights=torch.cat([self._weights[i] for i in everything]) if self._weights else None,
            advantages=batch.advantages,
            segments=batch.segments(everything, CPU),
            band=self.objective.band,
        )

    def _precision(self, batch: Batch) -> dict[str, float]:
        """Over the tokens of all optimizer steps, in their order."""
        keys = [(step, i) for step, indices in enumerate(self._passes) for i in indices]
        indices = [i for _, i in keys]
        return precision_metrics(
            torch.cat([self._logp[key] for key in keys]),
            torch.cat([self._shadow[key] for key in keys]),
            batch.packed(batch.logp_sampler, indices, CPU),
            torch.cat([self._log_ratio[key] for key in keys]),
            batch.advantages[indices],
            batch.segments(indices, CPU),
            self.objective.band,
            batch.ends(indices, self.stop_token_ids),
        )

    def _deployed(self, batch: Batch) -> dict[str, float]:
        everything = list(range(len(batch)))
        before = self._before
        if before is None:  # an aligned learner's own log-probs at the snapshot
            before = batch.packed(batch.logp_old, everything, CPU)
        after = before if self.policy.version == self._version else self._shadow_of_all(batch)
        return deployed_metrics(before, after, batch.advantages, batch.segments(everything, CPU))

    def _shadow_at(self, part: list[int], batch: Batch, logps: TokenLogProbs) -> Tensor:
        if logps.logp_shadow is not None:
            return logps.logp_shadow
        if self.policy.aligned:
            return logps.logp
        return self.policy.shadow_logprobs(*batch.texts(part), self.truncation, self.config.train.logprob_chunk)

    def _shadow_of_all(self, batch: Batch) -> Tensor:
        """The sampler's arithmetic at the current weights over every response: (T,) on the CPU."""
        train, found = self.config.train, {}
        for part in micro_batches(batch, list(range(len(batch))), train.micro_batch_tokens):
            logp = self.policy.shadow_logprobs(*batch.texts(part), self.truncation, train.logprob_chunk)
            found |= zip(part, batch.split(logp, part), strict=True)
        return torch.cat([found[i] for i in range(len(batch))])

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - begin
