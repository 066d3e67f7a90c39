"""Observer of one training step: runs the costly diagnostics that are due and records tokens for plots.

It runs additional forwards and backwards and does not change gradients, weights, optimizer or objective. A run is
bitwise the same with and without it.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from dataclasses import dataclass

import torch
from qarl_kernels.logprob import Truncation
from torch import Tensor

from qarl.batch.batch import CPU, Batch, Part, rounds
from qarl.batch.columns import Column
from qarl.batch.observer import Observer
from qarl.config import Config
from qarl.config.diagnostics import Costly
from qarl.diagnostics.backward import Modules, backward_error
from qarl.diagnostics.gradient_passes import Passes, trained_gram
from qarl.diagnostics.gradients import gradient_metrics, trained_metrics
from qarl.diagnostics.precision import deployed_metrics, precision_metrics
from qarl.diagnostics.record import StepTokens
from qarl.distributed.ranks import Ranks, SingleProcess
from qarl.objectives.common import TokenLogProbs
from qarl.objectives.objective import Objective, kl_to_reference
from qarl.objectives.segments import Totals
from qarl.policy.linear import WeightSet
from qarl.policy.policy import Policy
from qarl.utils.threads import one_thread


@dataclass
class _Seen:
    """Values of the training forwards of one optimizer step.

    log_ratio: log ratio that the objective clips. shadow: log-probs in the sampler's arithmetic. weights: correction
    weights, if there is a correction.
    """

    minibatch: Part
    logp: Column
    log_ratio: Column
    shadow: Column
    weights: Column


class Probe(Observer):
    """Runs the due diagnostics of one step.

    Args:
        policy: The policy that is trained.
        objective: The objective of the run.
        config: Configuration of the run.
        truncation: Truncation of the sampling distribution.
        due: The costly diagnostics of the step (`DiagnosticsConfig.due`).
        record: Keep the values that `tokens` returns.
        stop_token_ids: Token ids that end a response; precision/* reports these tokens separately.
        ranks: Ranks of the run; None for a single process. Each rank observes its own forwards, and the columns are
            gathered on all ranks at the end.

    Attributes:
        metrics: precision/*, deployed/*, policy/kl_ref, gradients/* and backward/*. Complete after `learned`.
        backward: Errors per linear layer, see `BackwardError`; None if not due.
        gradient_signs: Signs of the clean gradient by master name, int8 on the CPU; empty if not due.
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
        ranks: Ranks | None = None,
    ) -> None:
        self.policy, self.objective, self.config, self.truncation = policy, objective, config, truncation
        self.due, self.record, self.stop_token_ids = due, record, stop_token_ids
        self.ranks = ranks or SingleProcess()
        self.metrics: dict[str, float] = {}
        self.backward: Modules | None = None
        self.gradient_signs: dict[str, Tensor] = {}
        self._seen: list[_Seen] = []  # one per optimizer step
        self._weighted = False
        self._before: Tensor | None = None

    def begin(self, batch: Batch) -> None:
        if "deployed" in self.due and not self.policy.aligned:
            self._before = self._logps_of_all(batch, self.policy.shadow)

    def minibatch(self, minibatch: Part) -> None:
        count = len(minibatch.batch)
        self._seen.append(_Seen(minibatch, *(Column.empty(count) for _ in range(4))))
        if len(self._seen) == 1 and not {"gradients", "backward"}.isdisjoint(self.due):
            self._gradients(minibatch)

    @torch.no_grad()
    def forward(self, part: Part, logps: TokenLogProbs) -> None:
        shadow = "shadow" in self.due
        if not (shadow or self.record):
            return
        seen = self._seen[-1]
        seen.logp.fill(part, logps.logp)
        seen.log_ratio.fill(part, self.objective.log_ratio(logps, part.segments))
        if shadow:
            seen.shadow.fill(part, self._shadow_at(part, logps))
        if self.record and (weights := self.objective.weights(logps, part.segments)) is not None:
            self._weighted = True
            seen.weights.fill(part, weights)

    def learned(self, batch: Batch, metrics: dict[str, float]) -> None:
        if self.ranks.count > 1:
            self._share()
        if "shadow" in self.due:
            with one_thread():
                self.metrics |= self._precision(batch)
        if "deployed" in self.due:
            self.metrics |= self._deployed(batch)
        if "reference" in self.due:
            assert self.policy.reference is not None, "no reference was kept"
            old, reference = batch.whole(CPU).logp_old, self._logps_of_all(batch, self.policy.reference)
            self.metrics["policy/kl_ref"] = float(kl_to_reference(old.double(), reference.double(), "k3").mean())

    def _share(self) -> None:
        self._weighted = any(self.ranks.gather(self._weighted))  # a rank without responses has no weights
        for seen in self._seen:
            for column in (seen.logp, seen.log_ratio, seen.shadow, *([seen.weights] if self._weighted else [])):
                column.share(self.ranks)

    def _gradients(self, minibatch: Part) -> None:
        """Run the additional backwards at the weights of the step's first minibatch."""
        passes = Passes.of_run(self.config, self.policy, minibatch, self.truncation, self.objective.band)
        if "gradients" in self.due:
            self.metrics |= gradient_metrics(passes.gram())
            totals = Totals(len(minibatch), minibatch.tokens, self.config.rollout.max_response_length)
            parts = minibatch.micro_batches(self.config.train.micro_batch_tokens)
            gram, self.gradient_signs = trained_gram(passes, self.objective, parts, totals)
            self.metrics |= trained_metrics(gram)
        if "backward" in self.due:
            found = backward_error(passes)
            self.metrics |= found.metrics
            self.backward = found.modules

    def tokens(self, batch: Batch) -> StepTokens:
        """The step's tokens on the CPU, by response, with values of the learner's last training forward over each."""
        whole = batch.whole(CPU)
        last = {i: seen for seen in self._seen for i in seen.minibatch.indices}
        by_response = [last[i] for i in whole.indices]

        def packed(name: str) -> Tensor:
            return torch.cat([getattr(seen, name)[i] for i, seen in enumerate(by_response)])

        return StepTokens(
            logp_sampler=whole.logp_sampler,
            logp_old=whole.logp_old,
            logp=packed("logp"),
            logp_shadow=packed("shadow") if "shadow" in self.due else None,
            log_ratio=packed("log_ratio"),
            weights=packed("weights") if self._weighted else None,
            advantages=batch.advantages,
            segments=whole.segments,
            band=self.objective.band,
        )

    def _precision(self, batch: Batch) -> dict[str, float]:
        """precision/* over the tokens of all optimizer steps, in order."""
        parts = [batch.part(seen.minibatch.indices, CPU) for seen in self._seen]
        everything = batch.part([i for part in parts for i in part.indices], CPU)
        return precision_metrics(
            torch.cat([seen.logp.read(part) for seen, part in zip(self._seen, parts, strict=True)]),
            torch.cat([seen.shadow.read(part) for seen, part in zip(self._seen, parts, strict=True)]),
            everything.logp_sampler,
            torch.cat([seen.log_ratio.read(part) for seen, part in zip(self._seen, parts, strict=True)]),
            everything.advantages,
            everything.segments,
            self.objective.band,
            everything.ends(self.stop_token_ids),
        )

    def _deployed(self, batch: Batch) -> dict[str, float]:
        whole, before = batch.whole(CPU), self._before
        if before is None:  # an aligned learner's own log-probs at the snapshot
            before = whole.logp_old
        updates = self.policy.version - batch.version
        served = batch if self.policy.aligned else batch.served
        after = self._logps_of_all(served, self.policy.shadow) if updates else before
        metrics = deployed_metrics(before, after, whole.advantages, whole.segments)
        if updates:  # the study takes one optimizer step per batch
            metrics["deployed/improvement_per_update"] = metrics["deployed/improvement"] / updates
        return metrics

    def _shadow_at(self, part: Part, logps: TokenLogProbs) -> Tensor:
        if logps.logp_shadow is not None:
            return logps.logp_shadow
        return logps.logp if self.policy.aligned else self._logps(part.served, self.policy.shadow)

    def _logps_of_all(self, batch: Batch, weights: WeightSet) -> Tensor:
        """Log-probs of all responses under a weight set, such as the shadow's: (T,) on the CPU."""
        found, ranks = Column.empty(len(batch)), self.ranks
        for round_ in rounds(
            batch.whole().micro_batches(self.config.train.micro_batch_tokens, ranks.count), ranks.count
        ):
            if (part := round_[ranks.rank]) is not None:
                found.fill(part, self._logps(part, weights))
        found.share(ranks)
        return found.read(batch.whole(CPU))

    def _logps(self, part: Part, weights: WeightSet) -> Tensor:
        how = part.truncation(self.truncation), self.config.train.logprob_chunk, part.routes, part.written
        return self.policy.frozen_logprobs(weights, part.prompts, part.responses, *how)
