"""Changes of vLLM's sampling: seeded as fast as unseeded on a GPU, and stop strings found in responses alone.

vLLM generates the noise of a seeded request with the request's own generator: one kernel launch per request and step.
Here one counter-based kernel generates the noise of the whole batch from each request's seed and generator offset.
vLLM rewinds the offset if it discards a token, so a response depends only on its seed, its prompt and the weights.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor
from vllm.v1.engine import detokenizer
from vllm.v1.sample.ops import topk_topp_sampler as ops

STEP = 4  # increment of a generator's offset per token, the same as in vLLM


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

    ops.random_sample = random_sample  # type: ignore[assignment]


def detokenize_responses_alone() -> None:
    """Make vLLM look for stop strings in the text of the response's tokens, as the native engine does.

    vLLM decodes prompt and response together. If the prompt's text ends in U+FFFD, which is also how a part of a
    character decodes, vLLM takes the prompt for a part of the response, and a stop string in it ends the response.
    """
    original = detokenizer.FastIncrementalDetokenizer.__init__
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def init(self: Any, tokenizer: Any, request: Any) -> None:
        original(self, tokenizer, request)
        self.stream = DecodeStream(skip_special_tokens=self.skip_special_tokens)

    detokenizer.FastIncrementalDetokenizer.__init__ = init  # type: ignore[method-assign]


def draw(probs: Tensor, generators: dict[int, torch.Generator]) -> Tensor:
    """Sample one token id per row, by the Gumbel-max trick with exponential noise: argmax(probs / noise).

    Args:
        probs: (R, V) float32 on a GPU; overwritten.
        generators: Generator of each row. Their offsets advance by one token.

    Returns:
        (R,) int64.
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
