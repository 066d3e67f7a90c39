"""Tokens per second of the native engine, prompt and generation apart."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from qarl_kernels.logprob import Truncation

from qarl.inference.opening import Opened
from qarl.types import Prompt


@dataclass(frozen=True)
class SpeedTest:
    """batch: responses decoded together. prompt_tokens, new_tokens (at least 2): of each. repeats: timed ones."""

    batch: int = 8
    prompt_tokens: int = 128
    new_tokens: int = 32
    repeats: int = 3

    def within(self, context: int) -> SpeedTest:
        """The same with prompts that leave room for the new tokens in a context of so many."""
        return replace(self, prompt_tokens=min(self.prompt_tokens, context - self.new_tokens))


def engine_speed(opened: Opened, tokens: list[int], test: SpeedTest, seed: int) -> dict[str, Any]:
    """Median, lowest and highest rate over the repeats, after a short run that is not timed.

    tokens: text to make prompts of, repeated as needed. The engine of `opened` must take all prompts in its first step
    (max_num_seqs, max_batched_tokens): that step is the prefill, what follows it is the decode.
    """
    start = [i * test.prompt_tokens for i in range(test.batch)]
    text = tokens * (-(-test.batch * test.prompt_tokens // len(tokens)))
    prompts = [Prompt(i, text[s : s + test.prompt_tokens], "") for i, s in enumerate(start)]
    prefill, decode = [], []
    for repeat in range(test.repeats + 1):
        new_tokens = test.new_tokens if repeat > 0 else 2  # the first use of a shape costs more than the others
        sampling = opened.sampling(1, new_tokens, Truncation(), seed + repeat, ignore_eos=True)
        steps: list[tuple[float, int]] = []
        began = _now(opened)

        def progress(done: int, tokens: int, steps: list[tuple[float, int]] = steps) -> None:
            steps.append((_now(opened), tokens))

        opened.engine.generate(prompts, sampling, opened.policy.version, progress)
        (first, drawn), (last, total) = steps[0], steps[-1]
        assert drawn == test.batch, "the engine did not take all prompts in one step"
        if repeat > 0:
            prefill.append(test.batch * test.prompt_tokens / (first - began))
            decode.append((total - drawn) / (last - first))
    return {"prefill_tokens_per_s": _spread(prefill), "decode_tokens_per_s": _spread(decode)}


def _now(opened: Opened) -> float:
    if opened.policy.device.type == "cuda":
        torch.cuda.synchronize(opened.policy.device)
    return time.perf_counter()


def _spread(rates: list[float]) -> dict[str, float]:
    return {"median": statistics.median(rates), "low": min(rates), "high": max(rates)}
