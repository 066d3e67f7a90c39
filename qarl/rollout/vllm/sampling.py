"""Patches of vLLM: seeded sampling as fast as unseeded on a GPU, and the native engine's handling of stop strings.

vLLM generates the noise of a seeded request with the request's own generator: one kernel launch per request and step.
Here one counter-based kernel generates the noise of the whole batch from each request's seed and generator offset.
vLLM rewinds the offset if it discards a token, so a response depends only on its seed, its prompt and the weights.
"""

from __future__ import annotations

from functools import lru_cache, wraps
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor
from vllm.v1.engine import detokenizer
from vllm.v1.sample.ops import topk_topp_sampler as ops

from qarl.rollout.engine import SamplingParams
from qarl.rollout.stopping import Stopping

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


def find_stop_strings_as_native() -> None:
    """Make vLLM end a response at the token at which the native engine ends it.

    - vLLM decodes prompt and response together. If the prompt's text ends in U+FFFD, vLLM assumes an incomplete
      character and treats the prompt's text as part of the response, so a stop string in it ends the response. Here
      the response is decoded alone.
    - If a token ends within a character, vLLM holds back all of the token's text, even if it contains a stop string.
      Here `Stopping` checks every token for which vLLM returns no text.
    - If bytes turn a complete character into an invalid one, vLLM restarts its decoder, which may lose a space. From
      then on `Stopping` checks every token. This takes 30 us per token, 30 times as long as vLLM's own decoding.
    """
    fast = detokenizer.FastIncrementalDetokenizer
    original, update = fast.__init__, fast.update
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def init(self: Any, tokenizer: Any, request: Any) -> None:
        original(self, tokenizer, request)
        self.stream = self.first_stream = DecodeStream(skip_special_tokens=self.skip_special_tokens)
        self.stopping = _stopping(tokenizer, tuple(self.stop))

    @wraps(update)
    def updating(self: Any, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        length = len(self.output_text)
        found = update(self, new_token_ids, stop_terminated)
        if not self.stop or stop_terminated or len(new_token_ids) != 1:  # speculative decoding gives several
            return found
        if self.stream is not self.first_stream or len(self.output_text) == length:
            return self.stopping.stop_string(self.token_ids)
        return found

    fast.__init__, fast.update = init, updating  # type: ignore[method-assign]


@lru_cache(maxsize=8)
def _stopping(tokenizer: Any, stop: tuple[str, ...]) -> Stopping:
    return Stopping(tokenizer, SamplingParams(1, 0, 1, stop=stop))


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
