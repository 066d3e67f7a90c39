"""Log-probabilities of given tokens from hidden states, a few rows of logits at a time.

The logits matrix (tokens x vocabulary) is never in memory as a whole: forward and backward process fixed chunks of
rows, and the backward recomputes a chunk's logits. On the CPU a row's bits do not depend on the chunk or the batch. On
a GPU `qarl_kernels.head` stores no logits at all, except with top-k or top-p, which rank tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qarl_kernels import invariant
from qarl_kernels.backward import SumOf, output_grad, weight_grad_buffer
from qarl_kernels.truncation import CUT_LOGIT_GAP, Distribution, KeptSets, Recording, Replay, Truncation, normalized


def logits_of(hidden: Tensor, weight: Tensor, kernels: bool = True) -> Tensor:
    """Return hidden @ weight^T, float32 (R, V).

    Args:
        hidden: (R, H).
        weight: (V, H), float32 on the CPU, hidden's dtype on a GPU.
        kernels: On a GPU, whether 16-bit operands use the Triton product, which is batch invariant, or torch's.
    """
    if hidden.device.type == "cpu":
        return invariant.matmul(hidden.float(), weight)
    if hidden.dtype == torch.float32:
        return hidden @ weight.t()
    if kernels:
        from qarl_kernels import gemm  # imports Triton, which the CPU does not need

        return gemm.dense(hidden.contiguous(), weight, out_dtype=torch.float32)
    return torch.mm(hidden, weight.t(), out_dtype=torch.float32)


def truncate_(logits: Tensor, truncation: Truncation, kept: KeptSets | None = None) -> Tensor | None:
    """Apply temperature and truncation to logits in place.

    Args:
        logits: (R, V) float32.
        truncation: Temperature, top-k, top-p and min-p.
        kept: Sets to keep instead, one per row, whatever the logits are.

    Returns:
        The mask of cut tokens, bool (R, V), or None without truncation. Cut tokens get a logit CUT_LOGIT_GAP below the
        largest kept one.
    """
    if truncation.divisor != 1.0:
        logits.div_(truncation.divisor)
    if not truncation.active:
        return None
    if kept is not None:
        cut = kept.cut(logits.shape[-1], logits.device)
        top = logits.masked_fill(cut, float("-inf")).amax(-1, keepdim=True)
    else:
        cut, top = _cut(logits, truncation), logits.amax(-1, keepdim=True)  # the likeliest token is always kept
    logits.copy_(torch.where(cut, top - CUT_LOGIT_GAP, logits))
    return cut


def _cut(logits: Tensor, truncation: Truncation) -> Tensor:
    """Return the mask of tokens that truncation cuts, bool (R, V). logits: (R, V) float32, after temperature."""
    top = logits.amax(-1, keepdim=True)
    cut = torch.zeros_like(logits, dtype=torch.bool)
    if truncation.top_k > 0 and truncation.top_k < logits.shape[-1]:
        kth = logits.topk(truncation.top_k, dim=-1).values[:, -1:]
        cut |= logits < kth
    if truncation.min_p > 0.0:
        cut |= logits < top + math.log(truncation.min_p)
    if truncation.top_p < 1.0:
        kept = normalized(logits.masked_fill(cut, float("-inf"))).exp()
        order = kept.argsort(dim=-1, descending=True, stable=True)
        ranked = kept.gather(-1, order).double()
        before = ranked.cumsum(-1) - ranked  # probability of all likelier tokens
        cut = cut.scatter(-1, order, cut.gather(-1, order) | (before >= truncation.top_p))
    return cut.scatter_(-1, logits.argmax(-1, keepdim=True), False)


def distribution(hidden: Tensor, weight: Tensor, truncation: Truncation, kernels: bool = True) -> Distribution:
    """The sampling distribution after states (R, H) with an output layer (V, H); see `logits_of` for the arguments.

    Its log-probs are bit for bit those of `token_logprobs`.
    """
    if kernels and fused(hidden, weight, truncation):
        from qarl_kernels.head import fused_distribution  # imports Triton, which the CPU does not need

        return fused_distribution(hidden, weight, truncation)
    logits = logits_of(hidden, weight, kernels)
    truncate_(logits, truncation)
    return Distribution(logits, truncation.active)


def log_probs_of(logits: Tensor, truncation: Truncation) -> Tensor:
    """Return the sampling distribution as natural log-probs, float32 (R, V). Overwrites logits."""
    truncate_(logits, truncation)
    return normalized(logits)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, master, weight, targets, truncation, chunk, kernels, retained, sum_of):
        ctx.save_for_backward(hidden, weight, targets)
        ctx.truncation, ctx.chunk, ctx.kernels, ctx.master, ctx.sum_of = truncation, chunk, kernels, master, sum_of
        ctx.set_materialize_grads(False)  # an unused output has gradient None, and nothing is computed for it
        logp = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logp)
        for start, kept in _chunks(hidden.shape[0], chunk, truncation):
            part = slice(start, start + chunk)
            rows = logits_of(hidden[part], weight, kernels)
            if retained is not None:
                whole = torch.logsumexp(rows if truncation.divisor == 1.0 else rows / truncation.divisor, -1)
            cut = truncate_(rows, truncation, kept)
            if isinstance(truncation, Recording) and cut is not None:
                truncation.into.append(KeptSets.of(cut))
            if retained is not None:
                # Truncated tokens still count exp(-50) of the largest each: 3e-17 with 150,000 tokens.
                retained[part] = torch.logsumexp(rows, -1).sub_(whole).exp_().clamp_(max=1.0)
            rows = normalized(rows)
            target = targets[part, None]
            logp[part] = rows.gather(-1, target)[:, 0]
            if cut is not None:
                logp[part].masked_fill_(cut.gather(-1, target)[:, 0], float("-inf"))
            entropy[part] = -rows.exp().mul_(rows).sum(-1)  # finite: truncated logits are far down, not -inf
        return logp, entropy

    @staticmethod
    def backward(ctx, grad, grad_entropy):
        if grad is None and grad_entropy is None:
            return (None,) * 9
        hidden, weight, targets = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        into, returned = weight_grad_buffer(ctx.master, ctx.sum_of, weight)
        # On the CPU chunks are summed separately first, which gives the bits of autograd's accumulation.
        grad_weight = into
        if into is not None and into is not returned and hidden.device.type == "cpu":
            grad_weight = torch.zeros_like(into)
        wide = weight if weight.dtype == torch.bfloat16 else weight.float()
        for start, kept in _chunks(hidden.shape[0], ctx.chunk, ctx.truncation):
            part = slice(start, start + ctx.chunk)
            logits = logits_of(hidden[part], weight, ctx.kernels)
            cut = truncate_(logits, ctx.truncation, kept)
            scaled = (None if g is None else g[part, None] / ctx.truncation.divisor for g in (grad, grad_entropy))
            rows = _logit_grad(normalized(logits), cut, targets[part, None], *scaled)
            grad_hidden[part] = output_grad(rows, hidden[part], wide, grad_weight)
        if into is not None and grad_weight is not None and grad_weight is not into:
            into += grad_weight
        return grad_hidden, returned, None, None, None, None, None, None, None


def _chunks(rows: int, chunk: int, truncation: Truncation) -> list[tuple[int, KeptSets | None]]:
    """Return where each chunk of rows starts, and the sets to replay in it, if any."""
    starts = range(0, rows, chunk)
    sets = truncation.chunks(chunk) if isinstance(truncation, Replay) else [None] * len(starts)
    return list(zip(starts, sets, strict=True))


def _logit_grad(
    log_probs: Tensor, cut: Tensor | None, target: Tensor, grad: Tensor | None, grad_entropy: Tensor | None
) -> Tensor:
    """Return the gradient of the logits, (R, V). Truncated logits are constants with gradient 0.

        d logp / dz_j = [j = target] - p_j        0 in the whole row if the target is truncated
        dH / dz_j     = -p_j (log p_j + H)

    Args:
        log_probs: (R, V), overwritten.
        cut: (R, V) bool, mask of truncated tokens, or None.
        target: (R, 1) int64.
        grad, grad_entropy: (R, 1), output gradients divided by the temperature; at most one is None.
    """
    rows: Tensor | None = None
    if grad_entropy is not None:
        probs = log_probs.exp()
        entropy = -(probs * log_probs).sum(-1, keepdim=True)
        rows = probs.mul_(log_probs + entropy).mul_(-grad_entropy)
        if cut is not None:
            rows.masked_fill_(cut, 0.0)
    if grad is None:
        assert rows is not None
        return rows
    score = log_probs.exp_().neg_()
    score.scatter_add_(-1, target, torch.ones_like(score[:, :1]))
    score.mul_(grad)
    if cut is not None:
        score.masked_fill_(cut | cut.gather(-1, target), 0.0)
    return score if rows is None else rows.add_(score)


def token_logprobs(
    hidden: Tensor,
    master: Tensor | None,
    weight: Tensor,
    targets: Tensor,
    truncation: Truncation,
    chunk: int,
    kernels: bool = True,
    retained: list[Tensor] | None = None,
    sum_of: SumOf | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the log-prob of each target token and the entropy of its distribution.

    A target outside the truncated distribution has logp -inf and no gradient (DVP: a token that the learner's own
    vocabulary excludes has ratio 0). The kept set is a constant: it does not move with the logits. A `Recording`
    truncation stores the kept sets, and a `Replay` uses stored ones; both need top-k or top-p.

    Args:
        hidden: (R, H) bf16, fp16 or float32, the states before the targets.
        master: (V, H) float32 parameter that receives the output layer's gradient, or None.
        weight: (V, H), the values that the forward uses; see `logits_of` for its dtype and `kernels`.
        targets: (R,) int64.
        truncation: Temperature, top-k, top-p and min-p.
        chunk: Rows of logits in memory at once.
        kernels: Whether a GPU runs Triton kernels.
        retained: With truncation, receives the probability of the kept set before truncation, float32 (R,), without
            gradient (DVP, proposition 5.5), at the cost of one more reduction per chunk.
        sum_of: Gradient buffers; autograd then gets no gradient of a master that has one.

    Returns:
        logp (R,) and entropy (R,), float32, in nats, both differentiable. An unused output costs no backward.
    """
    mass = None
    if retained is not None and truncation.active:
        mass = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        retained.append(mass)
    if kernels and fused(hidden, weight, truncation):
        from qarl_kernels.head import FusedTokenLogProbs  # imports Triton, which the CPU does not need

        return FusedTokenLogProbs.apply(hidden, master, weight, targets, truncation, mass, sum_of)
    return _TokenLogProbs.apply(hidden, master, weight, targets, truncation, chunk, kernels, mass, sum_of)


def fused(hidden: Tensor, weight: Tensor, truncation: Truncation) -> bool:
    """Return whether `qarl_kernels.head` applies: 16-bit operands on a GPU, and neither top-k nor top-p."""
    assert truncation.ranked or not isinstance(truncation, Recording | Replay), "kept sets need top-k or top-p"
    narrow = hidden.dtype in (torch.bfloat16, torch.float16) and weight.dtype == hidden.dtype
    return hidden.device.type == "cuda" and narrow and not truncation.ranked
