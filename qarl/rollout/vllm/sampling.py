"""Seeded sampling in vLLM at the speed of unseeded sampling, on a GPU.

vLLM generates the noise of a seeded request with the request's own generator, one kernel launch per request and step.
Here one counter-based kernel generates the noise of the whole batch from each request's seed and generator offset,
which vLLM rewinds if it discards a token, so a response still depends on nothing else.
"""

from __future__ import annotations

from functools import wraps

import torch
from torch import Tensor
from vllm.v1.sample.ops import topk_topp_sampler as ops

STEP = 4  # a generator's offset per token, in vLLM and here


def batch_seeded_noise() -> None:
    """Replace vLLM's sampling function for batches on a GPU in which every request has a seed."""
    original = ops.random_sample
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def random_sample(probs: Tensor, generators: dict[int, torch.Generator], *rest: bool) -> Tensor:
        if any(rest) or probs.dtype != torch.float32 or not probs.is_cuda or len(generators) != len(probs):
            return original(probs, generators, *rest)
        return draw(probs, generators)

    ops.random_sample = random_sample


def draw(probs: Tensor, generators: dict[int, torch.Generator]) -> Tensor:
    """One token id per row, int64 (R,).

    probs: (R, V) float32 on a GPU, overwritten. generators: By row; their offsets advance by one token.
    """
    from qarl_kernels.draw import exponential_

    rows = [generators[row] for row in range(len(probs))]
    offsets = [generator.get_offset() for generator in rows]
    state = torch.tensor([[g.initial_seed() for g in rows], offsets], dtype=torch.int64, pin_memory=True)
    for generator, offset in zip(rows, offsets, strict=True):
        generator.set_offset(offset + STEP)
    seeds, counters = state.to(probs.device, non_blocking=True)
    noise = exponential_(torch.empty_like(probs, memory_format=torch.contiguous_format), seeds, counters)
    return probs.div_(noise).argmax(-1)
