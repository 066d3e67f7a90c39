"""Options of an exactness check, and the rounds of prompts that it samples."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from qarl_kernels.attention import PAGE
from qarl_kernels.logprob import Truncation

from qarl.errors import UserError
from qarl.inference.generate import check_sampling
from qarl.inputs.limits import SEQUENCES, TOKENS
from qarl.rollout.engine import SamplingParams
from qarl.types import Prompt

SAMPLES = 4  # responses that share a prompt
PROMPTS = 64  # maximum per round
LENGTHS = (1, 2, 4)  # divisors: the length limit of a round is the longest response, half of it, or a quarter
TOKENS_BY_DEVICE = {"cpu": 1024, "cuda": 32_768}
LONGEST_BY_DEVICE = {"cpu": 192, "cuda": 1024}
SEQUENCES_BY_DEVICE = {"cpu": 6, "cuda": 48}


@dataclass(frozen=True)
class Request:
    """Options of a check. None: a default for the device.

    Attributes:
        tokens: Minimum number of tokens to sample.
        longest: Maximum tokens of prompt and response.
        sequences: Maximum number of concurrent sequences.
    """

    tokens: int | None = None
    longest: int | None = None
    sequences: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def check(self) -> None:
        """Raise UserError for invalid values."""
        for name, value, least in (("--tokens", self.tokens, 1), ("--longest", self.longest, 2)):
            if value is not None and not least <= value <= TOKENS:
                raise UserError(f"{name}: {value} is not a number of tokens; give {least} to {TOKENS:,}")
        if self.sequences is not None and not 1 <= self.sequences <= SEQUENCES:
            raise UserError(f"--sequences: {self.sequences} is not a number of sequences; give 1 to {SEQUENCES:,}")
        check_sampling(self.truncation, self.seed, greedy=False)

    @property
    def truncation(self) -> Truncation:
        return Truncation(self.temperature, self.top_k, self.top_p, self.min_p)


@dataclass(frozen=True)
class Round:
    """Arguments of one `generate` call of the engine."""

    prompts: list[Prompt]
    sampling: SamplingParams


@dataclass(frozen=True)
class Sizes:
    """Sizes of a check.

    Attributes:
        tokens: Minimum number of tokens to sample.
        prompt, response: Maximum tokens of a prompt and of a response.
        sequences: Maximum number of concurrent sequences.
    """

    tokens: int
    prompt: int
    response: int
    sequences: int

    @property
    def longest(self) -> int:
        return self.prompt + self.response

    def prompts(self, response: int, sampled: int = 0) -> int:
        """Return the number of prompts of a round with the given response limit, after `sampled` tokens."""
        return min(max(2, ceil((self.tokens - sampled) / (SAMPLES * response))), PROMPTS)


def sizes_of(request: Request, given: Sequence[list[int]], context: int, device: str) -> Sizes:
    """Choose the sizes of a check.

    given: Token ids of the user's prompts. context: The model's context in tokens. device: cpu or cuda.
    """
    tokens, longest = request.tokens or TOKENS_BY_DEVICE[device], request.longest or LONGEST_BY_DEVICE[device]
    prompt = max(map(len, given), default=0)
    if prompt and request.longest is None:
        longest = prompt + longest // 2
    longest = min(longest, context)
    if request.longest is not None and request.longest > context:
        raise UserError(f"--longest: {request.longest} is above the model's {context} positions; lower it")
    if prompt >= longest:
        fix = "raise --longest" if longest < context else "shorten it"
        raise UserError(f"--prompts: one has {prompt} tokens, which leaves no room for a response in {longest}; {fix}")
    prompt = prompt or longest // 2
    return Sizes(tokens, prompt, longest - prompt, request.sequences or SEQUENCES_BY_DEVICE[device])


def rounds(
    request: Request,
    given: Sequence[list[int]],
    sizes: Sizes,
    vocabulary: int,
    sampled: Callable[[], int] = lambda: 0,
) -> Iterator[Round]:
    """Yield an endless, deterministic sequence of rounds.

    Args:
        request: Options of the check.
        given: Token ids of the user's prompts; each round takes some. If empty, prompts are random tokens.
        sizes: Sizes of the check.
        vocabulary: Number of token ids.
        sampled: Number of tokens sampled so far. A round has no more prompts than the rest of `sizes.tokens` needs.
    """
    generator, number, taken = random.Random(request.seed), 0, 0
    while True:
        response = max(1, sizes.response // LENGTHS[number % len(LENGTHS)])
        count = sizes.prompts(response, sampled())
        if given:
            prompts = [given[(taken + i) % len(given)] for i in range(count)]
            taken += count
        else:
            prompts = _prompts(generator, count, sizes.prompt, vocabulary)
        # A few random stop tokens, in addition to the limit, make responses end at different steps.
        stops = frozenset(generator.sample(range(vocabulary), max(1, vocabulary // (2 * response))))
        sampling = SamplingParams(SAMPLES, request.seed + number, response, request.truncation, (), stops)
        yield Round([Prompt(i, ids, "") for i, ids in enumerate(prompts)], sampling)
        number += 1


def _prompts(generator: random.Random, count: int, longest: int, vocabulary: int) -> list[list[int]]:
    """Return random prompts. Lengths around KV page boundaries come first, then any; some prompts extend another
    one.
    """
    edges = [length for length in (1, longest, PAGE, PAGE + 1, PAGE - 1, 2 * PAGE + 3) if length <= longest]
    found: list[list[int]] = []
    for i in range(count):
        length = edges[i] if i < len(edges) else round(longest ** generator.random())
        start = max(found, key=len)[: length - 1] if i % 4 == 3 else []
        found.append(start + [generator.randrange(vocabulary) for _ in range(length - len(start))])
    generator.shuffle(found)
    return found
