"""Four backward passes over one minibatch: what precision does to the gradient through ratio and score.

TRL study, section 7.3. With q the shadow's log-prob, l the learner's and b the sampler's, alpha = q - b, beta = l - q,
ratios detached and nothing clipped (C_t = 1):

    A = -1/N sum_t A_t e^alpha          grad q      B = -1/N sum_t A_t e^alpha          grad l
    C = -1/N sum_t A_t e^(alpha + beta) grad q      D = -1/N sum_t A_t e^(alpha + beta) grad l
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from qarl_kernels.logprob import Truncation
from torch import Tensor

from qarl.objectives.ratios import clamped_exp, log_ratio
from qarl.policy.policy import Policy
from qarl.training.batch import Batch

CHUNK = 1 << 24  # elements of two gradients that are float64 at a time


def four_pass_gram(
    policy: Policy, batch: Batch, parts: list[list[int]], tokens: int, truncation: Truncation, chunk: int,
    loss_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """Inner products of the gradients A, B, C, D at the current weights: (4, 4) float64, in that order.

    parts: the responses of the minibatch, cut into micro batches; those with advantage 0 may be left out. tokens: N, of
    the whole minibatch. loss_scale: see `optim.loss_scale`; it cancels. Masters' `.grad` and the optimizer are left as
    they were. An aligned learner has one gradient: all inner products are its square.

    Memory: the gradients A, B and C are held in float32 on the host, beside the one being made.
    """
    masters = [parameter for _, parameter in policy.named_parameters()]
    before = [master.grad for master in masters]
    for master in masters:
        master.grad = None
    try:
        return _gram(policy, masters, batch, parts, tokens, truncation, chunk, loss_scale)
    finally:
        for master, gradient in zip(masters, before, strict=True):
            master.grad = gradient


def _gram(
    policy: Policy, masters: list[Tensor], batch: Batch, parts: list[list[int]], tokens: int, truncation: Truncation,
    chunk: int, loss_scale: float,
) -> Tensor:  # fmt: skip
    shadow: dict[int, Tensor] = {}  # by micro batch, the ratio's log-probs where a pass of its own gave them
    learner: dict[int, Tensor] = {}
    passes = [(True, shadow), (False, shadow), (True, learner), (False, learner)][: 1 if policy.aligned else 4]
    held: list[list[Tensor | None]] = []
    gram = torch.zeros(4, 4, dtype=torch.float64)
    for row, (by_shadow, ratio_of) in enumerate(passes):
        for number, part in enumerate(parts):
            advantages = batch.segments(part, policy.device).expand(batch.advantages[part].to(policy.device))
            sampler = batch.packed(batch.logp_sampler, part, policy.device)
            # with gradient checkpointing the backward runs the forward again, in the same arithmetic
            with torch.enable_grad(), policy.shadow() if by_shadow else nullcontext():
                logp, _ = policy.logprobs(*batch.texts(part), truncation, chunk)
                (shadow if by_shadow else learner).setdefault(number, logp.detach())
                ratio, _ = clamped_exp(log_ratio(ratio_of[number], sampler))
                logp.backward(ratio * advantages * (-loss_scale / tokens))
        gradients = [master.grad for master in masters]
        for column, other in enumerate([*held, gradients]):
            gram[row, column] = gram[column, row] = _inner(other, gradients) / loss_scale**2
        if row + 1 < len(passes):
            held.append([None if g is None else g.cpu() for g in gradients])
        del gradients
        for master in masters:
            master.grad = None
    return gram[:1, :1].expand(4, 4).clone() if policy.aligned else gram


def _inner(first: list[Tensor | None], second: list[Tensor | None]) -> float:
    """<first, second> in float64 over all masters, on the second's device; a missing gradient is 0."""
    total = 0.0
    for a, b in zip(first, second, strict=True):
        if a is None or b is None:
            continue
        for x, y in zip(a.reshape(-1).split(CHUNK), b.reshape(-1).split(CHUNK), strict=True):
            total += float(torch.dot(x.to(y.device).double(), y.double()))
    return total
