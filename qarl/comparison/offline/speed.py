"""Tokens per second of the native engine, separately for prefill and decode."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any

from qarl_kernels.logprob import Truncation

from qarl.inference.opening import Opened
from qarl.types import Prompt
from qarl.utils.transfer import synchronized_s


@dataclass(frozen=True)
class SpeedTest:
    """Sizes of the speed test.

    Attributes:
        batch: Responses decoded together.
        prompt_tokens, new_tokens: Tokens per prompt and per response (at least 2).
        repeats: Number of timed repeats.
    """

    batch: int = 8
    prompt_tokens: int = 128
    new_tokens: int = 32
    repeats: int = 3

    def within(self, context: int) -> SpeedTest:
        """Return a test whose prompts are shortened so that prompt and response fit `context` tokens."""
        return replace(self, prompt_tokens=min(self.prompt_tokens, context - self.new_tokens))


def engine_speed(opened: Opened, tokens: list[int], test: SpeedTest, seed: int) -> dict[str, Any]:
    """Return median, minimum and maximum rate over the repeats, after a short untimed run.

    The engine must accept all prompts in its first step (max_num_seqs, max_batched_tokens). That step is the prefill,
    the rest is the decode.

    Args:
        opened: The opened target.
        tokens: Text to create prompts from, repeated as needed.
        test: Sizes of the test.
        seed: Random seed.
    """
    start = [i * test.prompt_tokens for i in range(test.batch)]
    text = tokens * (-(-test.batch * test.prompt_tokens // len(tokens)))
    prompts = [Prompt(i, text[s : s + test.prompt_tokens], "") for i, s in enumerate(start)]
    prefill, decode = [], []
    for repeat in range(test.repeats + 1):
        new_tokens = test.new_tokens if repeat > 0 else 2  # the first use of a shape costs more than the others
        sampling = opened.sampling(1, new_tokens, Truncation(), seed + repeat, ignore_eos=True)
        steps: list[tuple[float, int]] = []
        began = synchronized_s(opened.policy.device)

        def progress(done: int, tokens: int, steps: list[tuple[float, int]] = steps) -> None:
            steps.append((synchronized_s(opened.policy.device), tokens))

        opened.engine.generate(prompts, sampling, opened.policy.version, progress)
        (first, sampled), (last, total) = steps[0], steps[-1]
        assert sampled == test.batch, "the engine did not accept all prompts in one step"
        if repeat > 0:
            prefill.append(test.batch * test.prompt_tokens / (first - began))
            decode.append((total - sampled) / (last - first))
    return {"prefill_tokens_per_s": _spread(prefill), "decode_tokens_per_s": _spread(decode)}


def _spread(rates: list[float]) -> dict[str, float]:
    return {"median": statistics.median(rates), "low": min(rates), "high": max(rates)}
