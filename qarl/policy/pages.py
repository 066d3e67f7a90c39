"""Spans of sequences in a packed batch, and their slots in the pages of a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from qarl_kernels.attention import PAGE
from torch import Tensor

Caches: TypeAlias = Sequence[tuple[Tensor, Tensor]]  # per layer (k, v), each (P, H_kv, PAGE, D)


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one sequence in a packed batch.

    Attributes:
        row: First row in the batch.
        count: Number of tokens.
        position: Position of the first token in its sequence.
        pages: The sequence's KV pages in order, for all tokens up to the last of the span.
    """

    row: int
    count: int
    position: int
    pages: list[int]


def positions_of(spans: Sequence[Span]) -> list[int]:
    """Return the position of each token of the spans in its sequence."""
    return [p for s in spans for p in range(s.position, s.position + s.count)]


def slots_of(spans: Sequence[Span]) -> list[int]:
    """Return page * PAGE + offset of each token of the spans."""
    return [s.pages[p // PAGE] * PAGE + p % PAGE for s in spans for p in range(s.position, s.position + s.count)]
