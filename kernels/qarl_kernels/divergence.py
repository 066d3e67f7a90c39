"""Divergence of a student's next-token distribution from a teacher's, a few rows of logits at a time.

Distillation compares whole distributions, so it needs the logits of both models. They are never in memory as a whole:
forward and backward process chunks of rows, and the backward recomputes a chunk's logits. Keeping the gradient of the
logits from the forward instead (as fused cross-entropy kernels do) is not possible here: it is scaled per row by the
output gradient, which depends on the whole minibatch.

With p the teacher's and q the student's distribution (temperature T on both), m = beta p + (1 - beta) q:

    forward_kl   KL(p || q)                              dz_j = (q_j - p_j) / T
    reverse_kl   KL(q || p)                              dz_j = q_j (log(q_j / p_j) - KL(q || p)) / T
    jsd          beta KL(p || m) + (1 - beta) KL(q || m)  dz_j = (1 - beta) q_j (log(q_j / m_j) - KL(q || m)) / T

jsd is the generalized Jensen-Shannon divergence of GKD (Agarwal et al. 2024, eq. 1). The teacher gets no gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qarl_kernels.backward import SumOf, output_grad, weight_grad_buffer
from qarl_kernels.logprob import logits_of

Kind = Literal["forward_kl", "reverse_kl", "jsd"]


@dataclass(frozen=True)
class Divergence:
    """Kind and parameters of a divergence.

    Attributes:
        kind: See the module's docstring.
        beta: Weight of the teacher in the mixture of `jsd`.
        temperature: Divisor of both models' logits.
        top_k: Compare with the teacher's k most probable tokens only, renormalized (`forward_kl` only). 0: with all.
    """

    kind: Kind = "forward_kl"
    beta: float = 0.5
    temperature: float = 1.0
    top_k: int = 0

    def log_probs(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """Return log q and log p from logits (R, V) float32. Overwrites them."""
        if self.temperature != 1.0:
            student.div_(self.temperature)
            teacher.div_(self.temperature)
        if 0 < self.top_k < teacher.shape[-1]:
            lowest = teacher.topk(self.top_k, dim=-1).values[:, -1:]
            teacher.masked_fill_(teacher < lowest, -math.inf)
        return torch.log_softmax(student, -1), torch.log_softmax(teacher, -1)

    def value(self, log_q: Tensor, log_p: Tensor) -> Tensor:
        """Return the divergence of each row, (R,) float32, from log-probs (R, V)."""
        if self.kind == "forward_kl":
            return _kl(log_p, log_q)
        if self.kind == "reverse_kl":
            return _kl(log_q, log_p)
        log_m = self._mixture(log_q, log_p)
        return self.beta * _kl(log_p, log_m) + (1.0 - self.beta) * _kl(log_q, log_m)

    def logit_grad(self, log_q: Tensor, log_p: Tensor) -> Tensor:
        """Return the derivative of `value` by the student's logits, (R, V) float32."""
        if self.kind == "forward_kl":
            return log_q.exp().sub_(log_p.exp()).div_(self.temperature)
        other = log_p if self.kind == "reverse_kl" else self._mixture(log_q, log_p)
        q, gap = log_q.exp(), log_q - other
        scale = (1.0 if self.kind == "reverse_kl" else 1.0 - self.beta) / self.temperature
        return gap.sub_((q * gap).sum(-1, keepdim=True)).mul_(q).mul_(scale)

    def _mixture(self, log_q: Tensor, log_p: Tensor) -> Tensor:
        return torch.logaddexp(log_p + math.log(self.beta), log_q + math.log1p(-self.beta))


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(a || b) per row. A token that `a` excludes (log-prob -inf) counts 0."""
    return (log_a.exp() * (log_a - log_b).masked_fill_(log_a == -math.inf, 0.0)).sum(-1)


class _TokenDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, master, weight, states, head, divergence, chunk, kernels, sum_of):
        ctx.save_for_backward(hidden, weight, states, head)
        ctx.divergence, ctx.chunk, ctx.kernels, ctx.master, ctx.sum_of = divergence, chunk, kernels, master, sum_of
        value = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        agrees = torch.empty(hidden.shape[0], dtype=torch.bool, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            student, teacher = logits_of(hidden[part], weight, kernels), logits_of(states[part], head, kernels)
            agrees[part] = student.argmax(-1) == teacher.argmax(-1)
            value[part] = divergence.value(*divergence.log_probs(student, teacher))
        ctx.mark_non_differentiable(agrees)
        return value, agrees

    @staticmethod
    def backward(ctx, grad, _):
        hidden, weight, states, head = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        into, returned = weight_grad_buffer(ctx.master, ctx.sum_of, weight)
        wide = weight if weight.dtype == torch.bfloat16 else weight.float()
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            student = logits_of(hidden[part], weight, ctx.kernels)
            log_probs = ctx.divergence.log_probs(student, logits_of(states[part], head, ctx.kernels))
            rows = ctx.divergence.logit_grad(*log_probs).mul_(grad[part, None])
            grad_hidden[part] = output_grad(rows, hidden[part], wide, into)
        return grad_hidden, returned, None, None, None, None, None, None, None


def token_divergence(
    hidden: Tensor,
    master: Tensor | None,
    weight: Tensor,
    states: Tensor,
    head: Tensor,
    divergence: Divergence,
    chunk: int,
    kernels: bool = True,
    sum_of: SumOf | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the divergence of the student from the teacher at each row.

    Args:
        hidden: (R, H) bf16, fp16 or float32, the student's last hidden states.
        master: (V, H) float32 parameter that receives the gradient of the student's output layer, or None.
        weight: (V, H), values of the student's output layer; see `qarl_kernels.logprob.logits_of` for its dtype.
        states: (R, H') the teacher's last hidden states at the same positions.
        head: (V, H') the teacher's output layer, with the same vocabulary.
        divergence: Kind, temperature and top-k.
        chunk: Rows of logits in memory at once.
        kernels: Whether a GPU computes logits with Triton.
        sum_of: Gradient buffers; autograd then gets no gradient of a master that has one.

    Returns:
        The divergence (R,) float32 in nats, differentiable, and (R,) bool: both have the same most likely token.
    """
    return _TokenDivergence.apply(hidden, master, weight, states, head, divergence, chunk, kernels, sum_of)
