"""Divergence of a scheme's next-token distributions from those of bf16, and the increase in perplexity."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from qarl_kernels.logprob import logits_of
from torch import Tensor

from qarl.comparison.intervals import mean_interval
from qarl.comparison.offline.windows import Windows
from qarl.errors import UserError
from qarl.policy.policy import Policy

LOGIT_BYTES = 64 * 2**20  # per float64 chunk of logits; a few are in memory at once


@torch.no_grad()
def final_states(policy: Policy, windows: Windows) -> Tensor:
    """Return the final hidden state before each predicted token: (windows, predictions, H) on the CPU.

    Uses the sampler's arithmetic. `Sampler.logits` turns states into whole distributions, so a reference keeps only the
    states.
    """
    kept = []
    for ids in windows.ids:
        hidden = policy.sampler.states([ids])
        kept.append(hidden[len(ids) - 1 - windows.predictions : -1].cpu())
    return torch.stack(kept)


@dataclass(frozen=True)
class TokenNumbers:
    """Results per window and predicted token, float64 (windows, predictions), in nats.

    Attributes:
        kl: KL(reference || scheme) over the whole vocabulary.
        nll, reference_nll: -log p of the next token of the text.
        agrees: Bool, whether both have the same most likely token.
    """

    kl: Tensor
    nll: Tensor
    reference_nll: Tensor
    agrees: Tensor

    def summary(self) -> dict[str, Any]:
        """Return the entries of comparison.json. Intervals are over windows."""
        kl, low, high = mean_interval(self.kl.mean(1).tolist())
        agreement = mean_interval(self.agrees.double().mean(1).tolist())
        # Paired over the same tokens, so the ratio has a much smaller error than either perplexity.
        increase = mean_interval((self.nll - self.reference_nll).mean(1).tolist())
        flat = self.kl.flatten()
        return {
            "kl": {
                "mean": kl,
                "low": None if low is None else max(0.0, low),
                "high": high,
                "median": flat.quantile(0.5).item(),
                "p99": flat.quantile(0.99).item(),
                "max": flat.max().item(),
            },
            "top1_agreement": _named(agreement, lambda share: min(1.0, max(0.0, share))),
            "perplexity": _named(mean_interval(self.nll.mean(1).tolist()), _exp),
            "perplexity_ratio": _named(increase, _exp),
        }


class Reference(NamedTuple):
    """The policy that others are compared with: its states (windows, predictions, H) and its output layer (V, H)."""

    states: Tensor
    head: Tensor


@torch.no_grad()
def token_numbers(policy: Policy, states: Tensor, reference: Reference, windows: Windows) -> TokenNumbers:
    """Compare the distributions of a policy with those of the reference.

    Softmax and sums over the vocabulary are in float64, so that equal distributions give exactly 0.

    Args:
        policy: The policy.
        states: (windows, predictions, H), its states before each predicted token.
        reference: States and output layer of the reference; both have the policy's vocabulary.
        windows: The text.

    Raises:
        UserError: A log-prob is not finite.
    """
    device = policy.device
    head = reference.head.to(device)
    chunk = max(1, LOGIT_BYTES // (8 * head.shape[0]))
    columns: list[list[Tensor]] = [[], [], [], []]
    targets = torch.tensor([ids[-windows.predictions :] for ids in windows.ids])
    flat_states, flat_reference, flat_targets = states.flatten(0, 1), reference.states.flatten(0, 1), targets.flatten()
    for start in range(0, len(flat_targets), chunk):
        part = slice(start, start + chunk)
        p = logits_of(flat_reference[part].to(device), head, policy.kernels).double().log_softmax(-1)
        q = policy.sampler.logits(flat_states[part].to(device)).double().log_softmax(-1)
        following = flat_targets[part].to(device)[:, None]
        # A divergence is never negative, but its float64 sum may be by rounding.
        divergence = (p.exp() * (p - q)).sum(-1).clamp_(min=0.0)
        likely, reference_likely = (rows.gather(-1, following)[:, 0] for rows in (q, p))
        found = (divergence, -likely, -reference_likely, p.argmax(-1) == q.argmax(-1))
        for column, values in zip(columns, found, strict=True):
            column.append(values.cpu())
    numbers = TokenNumbers(*(torch.cat(column).view(targets.shape) for column in columns))
    if not (numbers.kl.isfinite().all() and numbers.nll.isfinite().all()):
        raise UserError("its log-probs on the text are not finite; use a model.dtype with a larger range")
    return numbers


def _named(values: Sequence[float | None], of: Callable[[float], float | None]) -> dict[str, float | None]:
    return {
        name: None if value is None else of(value) for name, value in zip(("mean", "low", "high"), values, strict=True)
    }


def _exp(x: float) -> float | None:
    """Return e^x, or None if it overflows float64 (interval bounds over very few windows)."""
    return math.exp(x) if x < 700 else None
