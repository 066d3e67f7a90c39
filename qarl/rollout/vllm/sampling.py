"""Seeded sampling in vLLM at the speed of unseeded sampling, on a GPU.

vLLM draws the noise of a request that has a seed with that request's own generator, a launch a request and step. Here
the noise of the whole batch is one counter-based kernel: a request's seed and how much of its generator is used up
(vLLM takes that back itself where it discards a token) decide its noise, so a response still depends on nothing else.
"""

from __future__ import annotations

from functools import wraps

import torch
from torch import Tensor
from vllm.v1.sample.ops import topk_topp_sampler as ops

STEP = 4  # by which a generator's offset counts one token, in vLLM and here


def batch_seeded_noise() -> None:
    """Replace vLLM's function for drawing tokens, for batches on a GPU in which every request has a seed."""
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
    """A token id for each row, int64 (R,). probs: (R, V) float32 on a GPU, overwritten. generators: by row; their
    offsets move on by one token."""
    from qarl_kernels.draw import exponential_

    rows = [generators[row] for row in range(len(probs))]
    offsets = [generator.get_offset() for generator in rows]
    state = torch.tensor([[g.initial_seed() for g in rows], offsets], dtype=torch.int64, pin_memory=True)
    for generator, offset in zip(rows, offsets, strict=True):
        generator.set_offset(offset + STEP)
    seeds, counters = state.to(probs.device, non_blocking=True)
    noise = exponential_(torch.empty_like(probs, memory_format=torch.contiguous_format), seeds, counters)
    return probs.div_(noise).argmax(-1)
