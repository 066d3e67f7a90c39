"""The gradient of router losses, in plain torch: experts used equally often, and logits that stay small.

Load balancing, as `load_balancing_loss_func` of transformers: E * sum_e F_e P_e over E experts. F_e is the mean number
of slots per token and layer that expert e has, without gradient; P_e is its mean probability over tokens and layers.
With k slots per token F sums to k, and the loss is k if all experts are used equally often. (Switch Transformer,
equation 4, has k = 1 and one layer.) z-loss: the mean of logsumexp(logits)^2 per layer (ST-MoE, equation 5).
"""

from __future__ import annotations

import torch
from torch import Tensor

from qarl_kernels.groups import Routed
from qarl_kernels.moe.reference import probabilities


def choices(experts: Tensor, total: int) -> Tensor:
    """Count how often each expert is chosen in each layer, (L, E) int64. experts: (T, L, k) integers; total: E."""
    layers = experts.shape[1]
    places = (experts.long() + total * torch.arange(layers, device=experts.device)[:, None]).flatten()
    counts = torch.zeros(layers * total, dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(0, places, torch.ones_like(places)).view(layers, total)  # integers: in any order


def balance_grad(
    routed: Routed, counted: slice, aux: float, z: float, slots: Tensor | None = None, layers: int = 1
) -> Tensor:
    """Return the gradient of one layer's part of both losses by its logits, (T, E) float32.

    Does not synchronize with the device; the same inputs give the same bits.

    Args:
        routed: Logits (T, E) and experts (T, k) of the layer.
        counted: Tokens over which the losses are means, at least one. Other rows get no gradient.
        aux: Weight of the load-balancing loss.
        z: Weight of the z-loss.
        slots: (E,) float32, F in the module's docstring, over all layers and the whole minibatch that contains these
            tokens. None: over this layer and these tokens.
        layers: Number of layers that F and P are means over.
    """
    logits, experts = routed.logits[counted], routed.experts[counted].long()
    tokens, total = logits.shape
    slots = choices(experts[:, None], total)[0].float() / tokens if slots is None else slots
    p = probabilities(logits)
    normalizer = logits.logsumexp(1, keepdim=True)
    slope = (aux * total / (tokens * layers)) * slots  # of the loss by each probability
    of_logits = p * (slope - (p * slope).sum(1, keepdim=True)) + (2 * z / tokens) * normalizer * p
    grad = torch.zeros_like(routed.logits)
    grad[counted] = of_logits
    return grad
