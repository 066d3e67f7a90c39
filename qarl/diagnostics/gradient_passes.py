"""Backward passes over one minibatch that separate effects of precision: through ratio, score and clipping.

TRL study, sections 7.3 and 10.3. Log-probs are q (shadow), l (learner) and b (sampler), alpha = q - b, beta = l - q,
and ratios are detached. C0 is 0 for tokens without gradient in the objective's band under e^alpha, else 1; C is the
same under e^(alpha + beta):

    A = -1/N sum_t A_t e^alpha          grad q        B = -1/N sum_t A_t e^alpha             grad l
    C = -1/N sum_t A_t e^(alpha + beta) grad q        D = -1/N sum_t A_t e^(alpha + beta)    grad l
    E = -1/N sum_t A_t e^(alpha + beta) C grad l      F = -1/N sum_t A_t e^(alpha + beta) C0 grad l

E - F is the study's d_clip. Passes that would repeat another are skipped: without clipped tokens, E and F equal D.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from qarl_kernels.logprob import Truncation
from torch import Tensor

from qarl.batch.batch import Part
from qarl.config import Config
from qarl.objectives.base import Band
from qarl.objectives.common import Constants, TokenLogProbs, clamped_exp, log_ratio
from qarl.objectives.objective import Objective
from qarl.objectives.segments import Totals, aggregate
from qarl.policy.gradients import GradientAccumulator
from qarl.policy.policy import Policy

CHUNK = 1 << 24  # elements per gradient that are converted to float64 at once


class Pass(NamedTuple):
    """Sources of the score, of the ratio and of the clip mask: True shadow, False learner, None no clipping."""

    score: bool
    ratio: bool
    clip: bool | None = None


LEARNER = Pass(False, False)
PASSES = (Pass(True, True), Pass(False, True), Pass(True, False), LEARNER)
CLIPPED_PASSES = (Pass(False, False, False), Pass(False, False, True))


@dataclass
class Passes:
    """Backward passes over one minibatch at the policy's current weights.

    They do not change the masters' `.grad`, the learner's gradient sums or the optimizer.

    Args:
        policy: The policy; all passes use its current weights.
        parts: Responses of the minibatch as micro-batches. Responses with advantage 0 may be left out.
        tokens: Number of tokens N of the whole minibatch.
        truncation: Truncation of the sampling distribution.
        chunk: Rows of logits computed at once (`train.logprob_chunk`).
        loss_scale: See `optim.loss_scale`. Inner products do not depend on it.
        band: Ratios with a gradient; None if the objective does not clip.
    """

    policy: Policy
    parts: list[Part]
    tokens: int
    truncation: Truncation
    chunk: int
    loss_scale: float = 1.0
    band: Band | None = None

    def __post_init__(self) -> None:
        self.sums = GradientAccumulator([master for _, master in self.policy.named_parameters()])
        # Log-probs per micro-batch of the first forward of shadow and learner; an aligned learner shares one list.
        shadow: list[Tensor] = []
        self.logp = {True: shadow, False: shadow if self.policy.aligned else []}

    @classmethod
    def of_run(
        cls, config: Config, policy: Policy, minibatch: Part, truncation: Truncation, band: Band | None
    ) -> Passes:
        """Passes over a minibatch of a run, without responses of advantage 0, which have no gradient."""
        train = config.train
        parts = minibatch.where(lambda advantage: advantage != 0).micro_batches(train.micro_batch_tokens)
        scale = config.diagnostic_loss_scale
        return cls(policy, parts, minibatch.tokens, truncation, train.logprob_chunk, scale, band)

    def gram(self) -> Tensor:
        """Compute the inner products of the gradients A to F.

        For an aligned learner beta is 0: A to D are the same gradient, and E and F are another one if tokens are
        clipped. Holds up to five gradients in float32 on the host, three if nothing is clipped, in addition to the
        current one.

        Returns:
            (6, 6) float64 in the order A to F, or (4, 4) of A to D without a band.
        """
        wanted = PASSES if self.band is None else PASSES + CLIPPED_PASSES
        rows: dict[Pass, int] = {}
        held: list[list[Tensor | None]] = []
        inner = torch.zeros(len(wanted), len(wanted), dtype=torch.float64)
        for number, one in enumerate(wanted):
            key = self._simplest(one)
            if key in rows:
                continue
            row = rows[key] = len(rows)
            gradients = self.gradients(key)
            for column, other in enumerate([*held, gradients]):
                inner[row, column] = inner[column, row] = _inner(other, gradients) / self.loss_scale**2
            if any(self._simplest(later) not in rows for later in wanted[number + 1 :]):
                held.append([None if g is None else g.cpu() for g in gradients])
            del gradients
        order = [rows[self._simplest(one)] for one in wanted]
        return inner[order][:, order]

    def _simplest(self, one: Pass) -> Pass:
        """The cheapest pass with the same gradient. Its clip mask needs the log-probs of earlier passes."""
        clip = one.clip
        if clip is not None:
            masks = {which: self._clipped(which) for which in (True, False)}
            if not any(bool(mask.any()) for mask in masks[clip]):
                clip = None
            elif all(torch.equal(a, b) for a, b in zip(*masks.values(), strict=True)):
                clip = True
        return Pass(True, True, clip) if self.policy.aligned else one._replace(clip=clip)

    def _ratio(self, number: int, which: bool) -> Tensor:
        """(T,) log ratio of a micro-batch against the sampler's reported log-probs."""
        return log_ratio(self.logp[which][number], self.parts[number].logp_sampler)

    def _clipped(self, which: bool) -> list[Tensor]:
        """(T,) bool per micro-batch: tokens without gradient under this ratio."""
        assert self.band is not None, "nothing clips without a band"
        return [
            self.band.outside(self.band.comparable(self._ratio(number, which)), part.advantages, part.segments)
            for number, part in enumerate(self.parts)
        ]

    def gradients(self, one: Pass) -> list[Tensor | None]:
        """Gradient of each master on its device, times the loss scale; None for masters without a gradient."""
        clipped = None if one.clip is None else self._clipped(one.clip)
        for number, part in enumerate(self.parts):
            weights = self.policy.shadow if one.score else self.policy.weights
            how = part.served if one.score and not self.policy.aligned else part
            with torch.enable_grad():
                arguments = part.prompts, part.responses, how.truncation(self.truncation), self.chunk
                logp, _ = self.policy.logprobs(*arguments, routes=how.routes, weights=weights, written=part.written)
                if len(self.logp[one.score]) == number:
                    self.logp[one.score].append(logp.detach())
                ratio, _ = clamped_exp(self._ratio(number, one.ratio))
                if clipped is not None:
                    ratio = ratio.masked_fill(clipped[number], 0.0)
                weight = ratio * part.segments.expand(part.advantages) * (-self.loss_scale / self.tokens)
                self.sums.backward(logp, weight)
        return self.sums.take()


def trained_gram(
    passes: Passes, objective: Objective, parts: list[Part], totals: Totals
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the inner products of the training gradient and the clean gradient (TRL study, section 8.4).

    The training gradient is that of the configured objective with its ratio, clip and correction, but without KL,
    teacher, entropy and router losses. The clean gradient is the learner's score weighted by A, with ratio 1 and no
    clipping: REINFORCE with the objective's aggregation. Both are computed at the weights at the start of the step,
    where the learner's log-probs are `logp_old`, except for tokens that an earlier policy version sampled.

    Args:
        passes: Provides the policy and the gradient sums; its log-probs are not used.
        objective: The configured objective.
        parts: All responses of the first minibatch, as micro-batches.
        totals: Divisors of the minibatch's loss.

    Returns:
        The products, (2, 2) float64, and the signs of the clean gradient by master name, int8 on the CPU.
    """
    policy, sums, scale = passes.policy, passes.sums, passes.loss_scale
    config = objective.config.model_copy(update={"kl_coef": 0.0, "entropy_coef": 0.0, "teacher": None})
    objective = replace(objective, config=config)

    @torch.enable_grad()
    def backward(part: Part, loss_of: Callable[[Tensor], Tensor]) -> Tensor:
        how = part.truncation(passes.truncation), passes.chunk
        logp, _ = policy.logprobs(part.prompts, part.responses, *how, routes=part.routes, written=part.written)
        sums.backward(loss_of(logp) * scale)
        return logp.detach()

    seen: list[TokenLogProbs] = []
    for part in parts:

        def clean(logp: Tensor, part: Part = part) -> Tensor:
            value = part.segments.expand(part.advantages) * logp.masked_fill(logp.isinf(), 0.0)
            return -aggregate(value, part.segments, config.aggregation, totals)

        now, shadow = backward(part, clean), None
        old = part.logp_old if part.batch.logp_old.known(part) else now  # known: computed before the first update
        if objective.needs.shadow:
            served = part if policy.aligned else part.served
            how = served.truncation(passes.truncation), passes.chunk, served.routes, part.written
            shadow = policy.frozen_logprobs(policy.shadow, part.prompts, part.responses, *how)
        seen.append(TokenLogProbs(now, old, part.logp_sampler, shadow))
    reference = [None if g is None else g.cpu() for g in sums.take()]
    names = [name for name, _ in policy.named_parameters()]
    signs = {name: g.sign().to(torch.int8) for name, g in zip(names, reference, strict=True) if g is not None}
    constants = _constants(objective, parts, seen) if objective.needs.minibatch else Constants()
    for part, known in zip(parts, seen, strict=True):

        def configured(logp: Tensor, part: Part = part, known: TokenLogProbs = known) -> Tensor:
            logps = replace(known, logp=logp)
            return objective(logps, part.advantages, part.segments, totals, constants)[0]

        backward(part, configured)
    trained = sums.take()
    own, both, base = _inner(trained, trained), _inner(reference, trained), _inner(reference, reference)
    return torch.tensor([[own, both], [both, base]], dtype=torch.float64) / scale**2, signs


def _constants(objective: Objective, parts: list[Part], seen: list[TokenLogProbs]) -> Constants:
    """The objective's constants for the whole minibatch."""
    shadows = [logps.logp_shadow for logps in seen if logps.logp_shadow is not None]
    logps = TokenLogProbs(
        torch.cat([logps.logp for logps in seen]),
        torch.cat([logps.logp_old for logps in seen]),
        torch.cat([logps.logp_sampler for logps in seen]),
        torch.cat(shadows) if shadows else None,
    )
    whole = parts[0].batch.part([i for part in parts for i in part.indices], parts[0].device)
    return objective.constants(logps, whole.advantages, whole.segments)


def _inner(first: list[Tensor | None], second: list[Tensor | None]) -> float:
    """<first, second> in float64 over all masters, on the second's device; a missing gradient is 0."""
    total = 0.0
    for a, b in zip(first, second, strict=True):
        if a is None or b is None:
            continue
        for x, y in zip(a.reshape(-1).split(CHUNK), b.reshape(-1).split(CHUNK), strict=True):
            total += float(torch.dot(x.to(y.device).double(), y.double()))
    return total
