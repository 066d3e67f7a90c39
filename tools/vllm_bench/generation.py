"""Tokens per second of a started vLLM, whoever asks it to draw."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from vllm_bench.case import Record

Draw = Callable[[list[list[int]], int, int], Sequence[int]]


def random_tokens(rows: int, length: int, vocabulary: int, random: torch.Generator) -> list[list[int]]:
    """Token ids; the first three of a vocabulary are special."""
    return torch.randint(3, vocabulary, (rows, length), generator=random).tolist()


def generate_record(
    draw: Draw, batch: int, vocabulary: int, random: torch.Generator, options: argparse.Namespace
) -> Record:
    """Tokens per second, seconds to all first tokens, and of each later one.

    draw: of prompts, new tokens of each response and a seed, gives the lengths of the responses. Prompts are new each
    time, so that none is in the prefix cache.
    """
    new = options.new_tokens

    def seconds_of(new_tokens: int, turn: int) -> float:
        prompts = random_tokens(batch, options.prompt_tokens, vocabulary, random)
        begin = time.perf_counter()
        lengths = draw(prompts, new_tokens, options.seed + turn)
        seconds = time.perf_counter() - begin
        assert list(lengths) == batch * [new_tokens], "nothing ends a response early"
        return seconds

    turns = range(options.generations + 1)
    first = [seconds_of(1, turn) for turn in turns]
    seconds = [seconds_of(new, turn) for turn in turns]
    until_first, middle = (statistics.median(times[1:]) for times in (first, seconds))
    return {
        "seconds": middle,
        "all_seconds": seconds[1:],
        "batch": batch,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": new,
        "tokens_per_s": batch * new / middle,
        "first_token_s": until_first,
        "later_token_s": (middle - until_first) / max(new - 1, 1),
    }
