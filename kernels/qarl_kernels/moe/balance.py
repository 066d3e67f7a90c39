"""Losses of a router: experts used alike, and logits that stay small; their values and their gradient, in plain torch.

load balancing: E * sum_e f_e P_e (Switch Transformer, equation 4), f_e the share of (token, slot) pairs that expert e
has, without gradient, P_e its mean probability; 1 where all are used alike. z-loss: the mean of logsumexp(logits)^2
(ST-MoE, equation 5).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qarl_kernels.moe.reference import probabilities
from qarl_kernels.moe.routed import Routed


@dataclass(frozen=True)
class Balance:
    """grad_logits: (T, E) float32, of aux * balance + z * z_loss. balance, z_loss: float32 scalars, not weighted."""

    grad_logits: Tensor
    balance: Tensor
    z_loss: Tensor


def choices(experts: Tensor, total: int) -> Tensor:
    """(L, E) int64: how often each of E = `total` experts is in each layer of `experts` (T, L, k), integers from 0."""
    layers = experts.shape[1]
    places = (experts.long() + total * torch.arange(layers, device=experts.device)[:, None]).flatten()
    counts = torch.zeros(layers * total, dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(0, places, torch.ones_like(places)).view(layers, total)  # integers: in any order


def balance_grad(routed: Routed, counted: slice, aux: float, z: float, shares: Tensor | None = None) -> Balance:
    """Both losses over the tokens `counted`, 1 or more, and what they add to the logits' gradient, there alone.

    aux, z: what the losses are multiplied by. shares: (E,) float32, the f of a batch that these tokens are a part of;
    None: they are all of it. Does not wait for the device; the same inputs give the same bits.
    """
    logits, experts = routed.logits[counted], routed.experts[counted].long()
    tokens, total = logits.shape
    share = choices(experts[:, None], total)[0].float() / experts.numel() if shares is None else shares
    p = probabilities(logits)
    normalizer = logits.logsumexp(1, keepdim=True)
    slope = (aux * total / tokens) * share  # of the loss by each probability
    of_logits = p * (slope - (p * slope).sum(1, keepdim=True)) + (2 * z / tokens) * normalizer * p
    grad = torch.zeros_like(routed.logits)
    grad[counted] = of_logits
    return Balance(grad, total * (share * p.mean(0)).sum(), normalizer.square().mean())
