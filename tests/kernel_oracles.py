"""Plain-torch definitions of kernels, used only by tests of several directories."""

import torch
from qarl_kernels.draw import LARGEST, LEAST, SMALLEST, STEP
from qarl_kernels.flash.pairs import paired
from torch import Tensor


def to_cache(rows: Tensor) -> Tensor:
    """Return e4m3 rows (..., D) as a cache of e4m3 stores them, in new memory: the inverse of `from_cache`."""
    if not paired(rows.shape[-1]):
        return rows.clone()
    halves = rows.view(torch.uint8).unflatten(-1, (2, -1))
    return halves.transpose(-1, -2).flatten(-2).view(rows.dtype)


def draw_reference(logits: Tensor, lse: Tensor, points: Tensor) -> Tensor:
    """Return the tokens of `qarl_kernels.draw.draw`."""
    p = (logits - lse[:, None]).exp()
    weights = torch.where(p > LEAST.value, p, 0.0).double()
    upto = weights.cumsum(-1)
    kept = weights > 0
    hit = kept & (upto > (points * upto[:, -1])[:, None])
    order = torch.arange(logits.shape[1], device=logits.device)
    last = torch.where(kept, order, 0).amax(-1)
    return torch.where(hit.any(-1), hit.int().argmax(-1), last)


def exponential_reference(seeds: Tensor, counters: Tensor, columns: int) -> Tensor:
    """Return the noise of `qarl_kernels.draw.exponential_`, float32 (R, columns)."""
    draws = torch.arange(-(-columns // 4), device=seeds.device)[None]
    zero = torch.zeros(len(seeds), draws.shape[1], dtype=torch.int64, device=seeds.device)
    state = [zero + draws, zero + counters[:, None], zero, zero]
    mask = 0xFFFFFFFF
    keys = [(seeds & mask)[:, None], ((seeds >> 32) & mask)[:, None]]
    for _ in range(10):
        high0, low0 = _multiply(state[0], 0xD2511F53)
        high2, low2 = _multiply(state[2], 0xCD9E8D57)
        state = [high2 ^ state[1] ^ keys[0], low2, high0 ^ state[3] ^ keys[1], low0]
        keys = [(keys[0] + 0x9E3779B9) & mask, (keys[1] + 0xBB67AE85) & mask]
    bits = torch.stack(state, -1).flatten(1)[:, :columns]
    uniform = bits.float() * STEP.value + SMALLEST.value
    return -uniform.clamp(max=LARGEST.value).log()


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Return the high and low 32 bits of the product of 32-bit values held in int64."""
    upper, lower = (a >> 16) * b, (a & 0xFFFF) * b  # below 2^48: a b = upper 2^16 + lower
    total = upper + (lower >> 16)
    return total >> 16, ((total & 0xFFFF) << 16) | (lower & 0xFFFF)
