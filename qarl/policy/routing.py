"""Which experts tokens went through, as rollouts carry it: small integers, with one mark for what nobody knows."""

from __future__ import annotations

import torch
from torch import Tensor

UINT8_EXPERTS = 255  # numbers 0 to 254; 255 is the mark


def stored_dtype(experts: int) -> torch.dtype:
    """uint8 of up to 255 experts a layer, else int16."""
    return torch.uint8 if experts <= UINT8_EXPERTS else torch.int16


def stored(numbers: Tensor, experts: int) -> Tensor:
    """Numbers of experts (T, L, k), any integer dtype, as `Rollout.routing` has them, on their device.

    experts: of a layer. A token of which nothing is known has negative numbers in all layers; there every bit is set:
    255 in uint8, -1 in int16. The k experts of a layer are ascending.
    """
    return numbers.to(torch.int16).to(stored_dtype(experts))


def numbers_of(routing: Tensor) -> Tensor:
    """int16 (T, L, k) of what `stored` made: unknown ones are -1, as `qarl.policy.routes.Routes` wants them."""
    if routing.dtype == torch.int16:
        return routing
    wide = routing.to(torch.int16)
    return wide.masked_fill_(wide == UINT8_EXPERTS, -1)


def unknown(tokens: int, like: Tensor) -> Tensor:
    """(tokens, L, k) of which nothing is known, in the dtype and with the layers of `like` (T, L, k)."""
    mark = UINT8_EXPERTS if like.dtype == torch.uint8 else -1
    return like.new_full((tokens, *like.shape[1:]), mark)
