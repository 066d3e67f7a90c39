"""A sampler whose model hashes the whole context, read through the KV cache, so a wrong page, slot or length shows.

It replaces the Triton layers of a real model, so tests can check the engine's inputs to them over thousands of steps.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from kernel_oracles import draw_reference
from qarl_kernels.attention import PAGE
from qarl_kernels.logprob import Truncation, truncate_
from qarl_kernels.truncation import Distribution
from torch import Tensor

from qarl.policy.fused_attention import DecodeAttention
from qarl.policy.pages import Caches, Span, positions_of, slots_of
from qarl.policy.routes import NO_ROUTES, ExpertLayer, Routes
from qarl.rollout.engine import SamplingParams
from qarl.rollout.sequence import uniforms
from qarl.types import Prompt

VOCABULARY = 40


@dataclass(frozen=True)
class Spans:
    spans: list[Span]
    caches: Caches


class HashingSampler:
    """The parts of `Sampler` that `NativeEngine` uses. steps: Number of rows of each forward, negative for decodes.
    experts: Layers with experts. A row is routed to the `choices` of its context, which do not change its hash."""

    current = True
    tracer = None
    experts: tuple[ExpertLayer, ...] = ()

    cache_dtype = torch.float32

    def __init__(self) -> None:
        self.layout = SimpleNamespace(
            max_length=4096, layers=1, kv_heads=1, head_dim=1, dtype=torch.float64, device=torch.device("cpu")
        )
        self.steps: list[int] = []
        self.install(None)

    def install(self, snapshot: object) -> None:
        self.weights = SimpleNamespace(fused=True)

    def paged(self, spans: list[Span], caches: Caches) -> Spans:
        return Spans(spans, caches)

    def hidden_states(self, ids: Tensor, attention: Spans | DecodeAttention, routes: Routes = NO_ROUTES) -> Tensor:
        keys = attention.caches[0][0]
        if isinstance(attention, Spans):
            positions, slots = positions_of(attention.spans), slots_of(attention.spans)
            pages = [span.pages for span in attention.spans for _ in range(span.count)]
            lengths = [position + 1 for position in positions]
            self.steps.append(len(positions))
        else:
            positions, slots = attention.positions.tolist(), attention.slots.tolist()
            pages, lengths = attention.page_table.tolist(), attention.lengths.tolist()
            assert max(lengths) <= attention.max_length == PAGE * attention.page_table.shape[1]
            self.steps.append(-len(positions))
        for token, position, slot in zip(ids.tolist(), positions, slots, strict=True):
            if slot >= 0:
                keys[slot // PAGE, 0, slot % PAGE, 0] = token + 1000 * position
        rows = [
            [int(keys[listed[p // PAGE], 0, p % PAGE, 0]) - 1000 * p for p in range(length)]
            for listed, length in zip(pages, lengths, strict=True)
        ]
        for layer in self.experts:
            routes.record_choice(layer.number, torch.tensor([choices(tokens, layer) for tokens in rows]))
        return torch.tensor([hash_of(tokens) for tokens in rows], dtype=torch.float64)[:, None]

    def distribution(self, hidden: Tensor, truncation: Truncation) -> Distribution:
        logits = logits_of(hidden)
        truncate_(logits, truncation)
        return Distribution(logits, truncation.active)


def hash_of(tokens: list[int]) -> int:
    total = 1
    for token in tokens:
        total = (total * 31 + token + 7) % 10_007
    return total


def choices(tokens: list[int], layer: ExpertLayer) -> list[int]:
    """Return the experts that the last of these tokens is routed to, ascending."""
    first = (hash_of(tokens) + layer.number) % (layer.count - layer.per_token)
    return list(range(first, first + layer.per_token))


def logits_of(hidden: Tensor) -> Tensor:
    """Return logits (R, V) float32 of hashes (R, 1)."""
    return (2 * torch.cos(hidden * torch.arange(1, VOCABULARY + 1))).float()


def expected(prompt: Prompt, sample: int, sampling: SamplingParams) -> tuple[list[int], list[float]]:
    """Return the tokens and log-probs of a response, computed one token at a time without an engine."""
    points = uniforms(sampling.seed, prompt.id, sample, sampling.max_response_length)
    tokens: list[int] = []
    logprobs: list[float] = []
    while len(tokens) < sampling.max_response_length and not (tokens and tokens[-1] in sampling.stop_token_ids):
        logits = logits_of(torch.tensor([[hash_of(prompt.token_ids + tokens)]], dtype=torch.float64))
        truncate_(logits, sampling.truncation)
        found = Distribution(logits, sampling.truncation.active)
        point = torch.tensor(points[len(tokens) : len(tokens) + 1])
        greedy = sampling.truncation.greedy
        token = found.logits.argmax(-1) if greedy else draw_reference(found.logits, found.lse, point)
        tokens.append(int(token))
        logprobs.append(float(found.logprobs(token)))
    return tokens, logprobs
