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
from qarl.objectives import Totals, add_stats, build_objective, finish_stats
from qarl.objectives.surrogate import Stats
from qarl.policy.policy import Policy
from qarl.training.batch import Batch, micro_batches, minibatches
from qarl.training.optim import Optimizer, clip_grad_norm, lr_at

Advance = Callable[[int], None]


@dataclass
class _Totals:
    """What one step adds up over its optimizer steps."""

    stats: Stats = field(default_factory=dict)
    loss: float = 0.0
    entropy: float = 0.0
    entropy_tokens: int = 0
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
        """Responses run by `learn` for a batch of this many: once an epoch, and for `logp_old` but the first part."""
        return responses * (self.config.train.epochs + 1) - min(self.config.minibatch_size, responses)

    def learn(self, batch: Batch, step: int, advance: Advance) -> dict[str, float]:
        """All optimizer steps on one batch. Fills `batch.logp_old`; returns the learner's metrics.

        `logp_old` is the learner at the rollout's snapshot. Before the first optimizer step the current parameters
        *are* that snapshot, so the first minibatch takes it from its own training forward; the rest is recomputed
        beforehand. A minibatch whose advantages are all 0 makes no optimizer step. advance(n): called as n of the
        `forwards` are done.
        """
        train = self.config.train
        total = _Totals()
        lr_factor = lr_at(step, train.steps, self.config.optim)
        self.optimizer.set_lr(lr_factor)
        for epoch in range(train.epochs):
            parts = minibatches(batch.groups, self.config.minibatch_size, train.seed, step, epoch)
            if epoch == 0:
                self._recompute([i for part in parts[1:] for i in part], batch, total, advance)
            for indices in parts:
                self._optimizer_step(indices, batch, total, advance)
        metrics = finish_stats(total.stats)
        steps = train.epochs * math.ceil(len(batch) / self.config.minibatch_size)
        measured = steps - total.skipped
        metrics["policy/loss"] = total.loss / steps
        metrics["policy/entropy"] = total.entropy / total.entropy_tokens
        metrics["policy/grad_norm"] = sum(total.grad_norms) / measured if measured else math.nan
        metrics["policy/skipped_steps"] = float(total.skipped)
        metrics["policy/zero_advantage_frac"] = float((batch.advantages == 0).float().mean())
        metrics["policy/version"] = float(self.policy.version)
        metrics["optim/lr"] = lr_factor * self.config.optim.lr
        metrics["learner_tokens"] = float(total.tokens)
        return metrics

    def _logprobs(self, indices: list[int], batch: Batch, total: _Totals) -> tuple[Tensor, Tensor]:
        total.tokens += batch.forward_tokens(indices)
        return self.policy.logprobs(
            [batch.prompts[i] for i in indices], [batch.responses[i] for i in indices], self.truncation,
            self.config.train.logprob_chunk,
        )  # fmt: skip

    def _keep_old(self, indices: list[int], batch: Batch, logp: Tensor, entropy: Tensor, total: _Totals) -> None:
        values = logp.detach().cpu().split([len(batch.responses[i]) for i in indices])
        for index, value in zip(indices, values, strict=True):
            batch.logp_old[index] = value
        total.entropy += float(entropy.double().sum())
        total.entropy_tokens += entropy.numel()

    @torch.no_grad()
    def _recompute(self, indices: list[int], batch: Batch, total: _Totals, advance: Advance) -> None:
        for part in micro_batches(batch, indices, self.config.train.micro_batch_tokens):
            self._keep_old(part, batch, *self._logprobs(part, batch, total), total)
            advance(len(part))

    def _optimizer_step(self, indices: list[int], batch: Batch, total: _Totals, advance: Advance) -> None:
        totals = Totals(
            len(indices), sum(len(batch.responses[i]) for i in indices), self.config.rollout.max_response_length
        )
        # A response with advantage 0 gives exactly no gradient, so it needs no backward.
        live = [i for i in indices if batch.advantages[i] != 0]
        idle = [i for i in indices if batch.advantages[i] == 0]
        for chosen, gradient in ((idle, False), (live, True)):
            for part in micro_batches(batch, chosen, self.config.train.micro_batch_tokens):
                with torch.set_grad_enabled(gradient):
                    loss = self._loss(part, batch, totals, total)
                if gradient:
                    loss.backward()
                total.loss += float(loss.detach())
                advance(len(part))
        if live:
            self._update(total)
            self.optimizer.zero_grad()

    def _loss(self, part: list[int], batch: Batch, totals: Totals, total: _Totals) -> Tensor:
        device = self.policy.device
        logp, entropy = self._logprobs(part, batch, total)
        if any(batch.logp_old[i] is None for i in part):
            self._keep_old(part, batch, logp, entropy, total)
        loss, stats = self.objective(
            logp,
            batch.packed(batch.logp_old, part, device),
            batch.packed(batch.logp_sampler, part, device),
            batch.advantages[part].to(device),
            batch.segments(part, device),
            totals,
        )
        total.stats = add_stats(total.stats, stats)
        return loss

    def _update(self, total: _Totals) -> None:
        parameters = [parameter for _, parameter in self.policy.named_parameters()]
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
