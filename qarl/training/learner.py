"""The learner: log-probs on the policy's own low-bit tensors, gradients to the FP32 masters, one quantization
a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from qarl_kernels.logprob import Truncation
from torch import Tensor

from qarl.config import Config
from qarl.errors import UserError
from qarl.objectives import Constants, Stats, TokenLogProbs, Totals, add_stats, build_objective, finish_stats
from qarl.policy.policy import Policy
from qarl.training.batch import Batch, micro_batches, minibatches
from qarl.training.optim import Optimizer, clip_grad_norm, lr_at
from qarl.training.probe import Probe
from qarl.weight_sync.snapshot import Snapshot

Advance = Callable[[int], None]


@dataclass
class _Totals:
    """What one step adds up over its optimizer steps. snapshot: the rollout's, which it starts from."""

    snapshot: Snapshot
    stats: Stats = field(default_factory=dict)
    loss: float = 0.0
    entropy: float = 0.0
    entropy_tokens: int = 0
    retained: list[Tensor] = field(default_factory=list)  # (T,) of each forward at the snapshot, under truncation
    grad_norms: list[float] = field(default_factory=list)
    tokens: int = 0
    skipped: int = 0


class Learner:
    """Turns a batch into optimizer steps.

    skipped_in_a_row: optimizer steps skipped for a non-finite gradient since the last good one; past
    `train.max_skipped_steps` the run stops with a UserError.
    """

    def __init__(self, policy: Policy, optimizer: Optimizer, config: Config, truncation: Truncation) -> None:
        self.policy, self.optimizer, self.config, self.truncation = policy, optimizer, config, truncation
        self.objective = build_objective(config.objective, config.correction)
        self.skipped_in_a_row = 0

    def forwards(self, responses: int) -> int:
        """Responses that `learn` reports for a batch of this many: once an epoch, and for `logp_old` but the first
        part. Forwards of shadow and reference, and those for a minibatch's constants, go with them."""
        return responses * (self.config.train.epochs + 1) - min(self.config.minibatch_size, responses)

    def learn(self, batch: Batch, step: int, advance: Advance, probe: Probe | None = None) -> dict[str, float]:
        """All optimizer steps on one batch. Fills `batch.logp_old` and `batch.logp`; returns the learner's metrics.

        `logp_old` is the learner at the rollout's snapshot. Before the first optimizer step the current parameters
        *are* that snapshot, so the first minibatch takes it from its own forward; the rest is recomputed beforehand.
        A minibatch whose advantages are all 0 makes no optimizer step where that gives exactly no gradient.
        step: training step, from 0. advance(n): called as n of the `forwards` are done. probe: watches.
        """
        train = self.config.train
        total = _Totals(self.policy.current)
        lr_factor = lr_at(step, train.steps, self.config.optim)
        self.optimizer.set_lr(lr_factor)
        if probe is not None:
            probe.begin(batch)
        for epoch in range(train.epochs):
            parts = minibatches(batch.groups, self.config.minibatch_size, train.seed, step, epoch)
            if epoch == 0:
                self._recompute([i for part in parts[1:] for i in part], batch, total, advance)
            for indices in parts:
                self._optimizer_step(indices, batch, total, advance, probe)
        if probe is not None:
            probe.end(batch)
        metrics = finish_stats(total.stats)
        steps = train.epochs * math.ceil(len(batch) / self.config.minibatch_size)
        measured = steps - total.skipped
        metrics["policy/loss"] = total.loss / steps
        metrics["policy/entropy"] = total.entropy / total.entropy_tokens
        metrics |= _retained_mass(total.retained)
        metrics["policy/grad_norm"] = sum(total.grad_norms) / measured if measured else math.nan
        metrics["policy/skipped_steps"] = float(total.skipped)
        metrics["policy/zero_advantage_frac"] = float((batch.advantages == 0).float().mean())
        metrics["policy/version"] = float(self.policy.version)
        metrics["optim/lr"] = lr_factor * self.config.optim.lr
        metrics["learner_tokens"] = float(total.tokens)
        return metrics

    # --- forwards ----------------------------------------------------------------------------------------------

    def _logprobs(self, indices: list[int], batch: Batch, total: _Totals) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy; of the first forward over a response, at the snapshot, the retained mass is kept."""
        total.tokens += batch.forward_tokens(indices)
        first = total.retained if any(batch.logp_old[i] is None for i in indices) else None
        return self.policy.logprobs(*batch.texts(indices), self.truncation, self.config.train.logprob_chunk, first)

    def _shadow(self, indices: list[int], batch: Batch, logp: Tensor, total: _Totals) -> Tensor:
        """The sampler's arithmetic at the current weights: an aligned learner's own log-probs."""
        if self.policy.aligned:
            return logp.detach()
        total.tokens += batch.forward_tokens(indices)
        return self.policy.shadow_logprobs(*batch.texts(indices), self.truncation, self.config.train.logprob_chunk)

    def _reference(self, indices: list[int], batch: Batch, total: _Totals) -> Tensor:
        """The reference's log-probs, which no step changes: one forward over each response in a training step."""
        if any(batch.logp_ref[i] is None for i in indices):
            total.tokens += batch.forward_tokens(indices)
            chunk = self.config.train.logprob_chunk
            logp = self.policy.reference_logprobs(*batch.texts(indices), self.truncation, chunk)
            for index, value in zip(indices, batch.split(logp, indices), strict=True):
                batch.logp_ref[index] = value
        return batch.packed(batch.logp_ref, indices, self.policy.device)

    def _keep_old(self, indices: list[int], batch: Batch, logp: Tensor, entropy: Tensor, total: _Totals) -> None:
        for index, value in zip(indices, batch.split(logp, indices), strict=True):
            batch.logp_old[index] = value
        total.entropy += float(entropy.detach().double().sum())
        total.entropy_tokens += entropy.numel()

    @torch.no_grad()
    def _recompute(self, indices: list[int], batch: Batch, total: _Totals, advance: Advance) -> None:
        for part in micro_batches(batch, indices, self.config.train.micro_batch_tokens):
            self._keep_old(part, batch, *self._logprobs(part, batch, total), total)
            advance(len(part))

    def _token_logprobs(self, part: list[int], batch: Batch, total: _Totals) -> TokenLogProbs:
        """Everything that the objective needs of a training forward over `part`."""
        needs, device = self.objective.needs, self.policy.device
        logp, entropy = self._logprobs(part, batch, total)
        if any(batch.logp_old[i] is None for i in part):
            self._keep_old(part, batch, logp, entropy, total)
        for index, value in zip(part, batch.split(logp, part), strict=True):
            batch.logp[index] = value
        return TokenLogProbs(
            logp,
            batch.packed(batch.logp_old, part, device),
            batch.packed(batch.logp_sampler, part, device),
            self._shadow(part, batch, logp, total) if needs.shadow else None,
            self._reference(part, batch, total) if needs.reference else None,
            entropy if needs.entropy else None,
        )

    @torch.no_grad()
    def _constants(self, indices: list[int], batch: Batch, total: _Totals, advance: Advance) -> Constants:
        """The objective's constants of a whole minibatch, from a pass over it before its first backward.

        Packed in the order of `indices`, they do not depend on how it is cut. While the weights are the snapshot's,
        `logp_old` is that pass, where it is known.
        """
        if not self.objective.needs.minibatch:
            return Constants()
        needs_shadow, device = self.objective.needs.shadow, self.policy.device
        known = self.policy.current is total.snapshot and all(batch.logp_old[i] is not None for i in indices)
        logp = dict.fromkeys(indices) | ({i: batch.logp_old[i] for i in indices} if known else {})
        shadow: dict[int, Tensor | None] = dict.fromkeys(indices)
        for part in micro_batches(batch, indices, self.config.train.micro_batch_tokens):
            if known:
                now = batch.packed(batch.logp_old, part, device)
            else:
                now, entropy = self._logprobs(part, batch, total)
                if any(batch.logp_old[i] is None for i in part):
                    self._keep_old(part, batch, now, entropy, total)
                logp |= zip(part, batch.split(now, part), strict=True)
            if needs_shadow:
                shadow |= zip(part, batch.split(self._shadow(part, batch, now, total), part), strict=True)
            advance(0)
        logps = TokenLogProbs(
            torch.cat([logp[i] for i in indices]).to(device),
            batch.packed(batch.logp_old, indices, device),
            batch.packed(batch.logp_sampler, indices, device),
            torch.cat([shadow[i] for i in indices]).to(device) if needs_shadow else None,
        )
        return self.objective.constants(logps, batch.advantages[indices].to(device), batch.segments(indices, device))

    # --- optimizer steps ---------------------------------------------------------------------------------------

    def _optimizer_step(
        self, indices: list[int], batch: Batch, total: _Totals, advance: Advance, probe: Probe | None
    ) -> None:
        totals = Totals(
            len(indices), sum(len(batch.responses[i]) for i in indices), self.config.rollout.max_response_length
        )
        if probe is not None:
            probe.minibatch(indices, batch)
        constants = self._constants(indices, batch, total, advance)
        # A response with advantage 0 gives, in most objectives, exactly no gradient: it then needs no backward.
        idle = [i for i in indices if self.objective.zero_advantage_is_idle and batch.advantages[i] == 0]
        live = [i for i in indices if not (self.objective.zero_advantage_is_idle and batch.advantages[i] == 0)]
        for chosen, gradient in ((idle, False), (live, True)):
            for part in micro_batches(batch, chosen, self.config.train.micro_batch_tokens):
                with torch.set_grad_enabled(gradient):
                    loss = self._loss(part, batch, totals, constants, total, probe)
                if gradient:
                    (loss if self.config.loss_scale == 1.0 else loss * self.config.loss_scale).backward()
                total.loss += float(loss.detach())
                advance(len(part))
        if live:
            self._update(total)
            self.optimizer.zero_grad()

    def _loss(
        self, part: list[int], batch: Batch, totals: Totals, constants: Constants, total: _Totals, probe: Probe | None
    ) -> Tensor:
        device = self.policy.device
        logps, segments = self._token_logprobs(part, batch, total), batch.segments(part, device)
        if probe is not None:
            probe.forward(part, batch, logps, segments)
        loss, stats = self.objective(logps, batch.advantages[part].to(device), segments, totals, constants)
        total.stats = add_stats(total.stats, stats)
        return loss

    def _update(self, total: _Totals) -> None:
        parameters = [parameter for _, parameter in self.policy.named_parameters()]
        if self.config.loss_scale != 1.0:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(self.config.loss_scale)
        norm = clip_grad_norm(parameters, self.config.optim.max_grad_norm)
        if not math.isfinite(norm):
            total.skipped += 1
            self.skipped_in_a_row += 1
            if self.skipped_in_a_row > self.config.train.max_skipped_steps:
                raise UserError(
                    f"learner: the gradient was not finite in {self.skipped_in_a_row} optimizer steps in a row "
                    "(train.max_skipped_steps); lower optim.lr, or look at the last rollouts and rewards"
                )
            return
        self.skipped_in_a_row = 0
        total.grad_norms.append(norm)
        self.optimizer.step()
        self.policy.refresh(self.policy.version + 1)


def _retained_mass(masses: list[Tensor]) -> dict[str, float]:
    """policy/retained_mass_mean and _min: the probability that the learner's set keeps at the places of the response
    tokens, of the distribution before truncation, at the snapshot. Nothing without truncation."""
    if not masses:
        return {}
    mass = torch.cat(masses).double()
    mean, least = torch.stack([mass.mean(), mass.min()]).tolist()
    return {"policy/retained_mass_mean": mean, "policy/retained_mass_min": least}
