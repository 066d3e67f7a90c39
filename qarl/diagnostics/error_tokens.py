"""Error tokens: repetitive and garbled stretches of a response (QaRL, section 3.2 and table 6).

Low-bit sampling adds noise that accumulates along a response. Then the response repeats itself, or contains tokens that
are improbable under the policy itself. The paper shows such stretches but defines no detector; these are ours:

repetitive  a period of 1 to 32 tokens, repeated exactly over at least 24 tokens and at least 4 periods. Lower limits
            would catch the zeros of a large number, a vector of zeros, or a ruled line.
garbled     8 or more consecutive tokens with mean log-prob below -4 nats under the sampler's truncated distribution.
            Log-probs are clamped at -8, so that one very improbable token is not enough: at least four of eight must
            be improbable. Overlapping windows are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from qarl.objectives.segments import Segments

MAX_PERIOD = 32
MIN_TOKENS, MIN_PERIODS = 24, 4
WINDOW, MEAN_LOGP, LOWEST_LOGP = 8, -4.0, -8.0
CONTEXT_TOKENS = 40  # shown on each side of an example

Kind = Literal["repetitive", "garbled"]


class Stretch(NamedTuple):
    """Tokens from start to stop (exclusive) of a response."""

    start: int
    stop: int
    kind: Kind


def stretches(token_ids: Sequence[int], logp_sampler: Sequence[float]) -> list[Stretch]:
    """Find the error stretches of one response, ordered by start. A repetitive and a garbled stretch may overlap."""
    ids = np.asarray(token_ids, dtype=np.int64)
    response = np.zeros(len(ids), dtype=np.int64)
    logp = np.asarray(logp_sampler, dtype=np.float64)
    found = [Stretch(a, b, "repetitive") for a, b in _runs(_repetitive(ids, response))]
    found += [Stretch(a, b, "garbled") for a, b in _runs(_garbled(logp, response))]
    return sorted(found)


def error_token_metrics(
    token_ids: Tensor,  # (T,) integers, the sampled tokens
    logp_sampler: Tensor,  # (T,) as the sampler reported
    advantages: Tensor,  # (R,)
    segments: Segments,
) -> dict[str, float]:
    """Compute the error_tokens/* metrics of a batch:

        frac, repetitive_frac, garbled_frac  fraction of tokens in a stretch: of any kind, of each kind
        positive_frac, negative_frac         the same among tokens of responses with A > 0, A < 0; 0.0 without any
        responses_frac                       fraction of responses with at least one stretch

    Runs on the CPU with numpy: about 0.3 s for a million tokens.
    """
    response = segments.index.cpu().numpy()
    repetitive = _repetitive(token_ids.cpu().numpy(), response)
    garbled = _garbled(logp_sampler.detach().cpu().double().numpy(), response)
    error = repetitive | garbled
    sign = torch.sign(advantages).cpu().numpy()[response]
    positive, negative = sign > 0, sign < 0
    hit = np.zeros(len(advantages), dtype=bool)
    hit[response[error]] = True
    return {
        "error_tokens/frac": _share(error),
        "error_tokens/repetitive_frac": _share(repetitive),
        "error_tokens/garbled_frac": _share(garbled),
        "error_tokens/positive_frac": _share(error[positive]),
        "error_tokens/negative_frac": _share(error[negative]),
        "error_tokens/responses_frac": _share(hit),
    }


def error_examples(
    responses: Sequence[Sequence[int]],
    logp_sampler: Sequence[Tensor],  # R tensors (T_r,)
    advantages: Tensor,  # (R,)
    decode: Callable[[list[int]], Any],  # a tokenizer's, which returns a text for one sequence
    limit: int,
) -> list[dict[str, Any]]:
    """Return up to `limit` stretches as text for diagnostics/NNNNNN.json: the longest per response, longest first.

    Each row has text (the stretch), before and after (up to CONTEXT_TOKENS tokens of context), kind, response (index),
    start and stop (token positions), and advantage.
    """
    longest: list[tuple[int, Stretch]] = []
    for index, (ids, logp) in enumerate(zip(responses, logp_sampler, strict=True)):
        found = stretches(ids, logp.tolist())
        if found:
            longest.append((index, max(found, key=lambda s: s.stop - s.start)))
    longest.sort(key=lambda item: item[1].start - item[1].stop)
    return [
        {
            "text": decode(list(responses[index][start:stop])),
            "before": decode(list(responses[index][max(0, start - CONTEXT_TOKENS) : start])),
            "after": decode(list(responses[index][stop : stop + CONTEXT_TOKENS])),
            "kind": kind,
            "response": index,
            "start": start,
            "stop": stop,
            "advantage": float(advantages[index]),
        }
        for index, (start, stop, kind) in longest[:limit]
    ]


def _repetitive(ids: np.ndarray, response: np.ndarray) -> np.ndarray:
    """(T,) bool mask of repetitive stretches. ids, response: (T,), packed."""
    marked = np.zeros(len(ids), dtype=bool)
    for period in range(1, MAX_PERIOD + 1):
        tokens = max(MIN_TOKENS, MIN_PERIODS * period)
        equal = (ids[period:] == ids[:-period]) & (response[period:] == response[:-period])
        for start, stop in _runs(equal, tokens - period):
            marked[start : stop + period] = True
    return marked


def _garbled(logp: np.ndarray, response: np.ndarray) -> np.ndarray:
    """(T,) bool mask of garbled stretches. logp: (T,) float64, response: (T,), packed."""
    marked = np.zeros(len(logp), dtype=bool)
    if len(logp) < WINDOW:
        return marked
    total = np.concatenate([[0.0], np.cumsum(np.clip(logp, LOWEST_LOGP, 0.0))])
    low = total[WINDOW:] - total[:-WINDOW] < WINDOW * MEAN_LOGP
    low &= response[WINDOW - 1 :] == response[: len(response) - WINDOW + 1]
    for start, stop in _runs(low):
        marked[start : stop + WINDOW - 1] = True
    return marked


def _runs(mask: np.ndarray, length: int = 1) -> list[tuple[int, int]]:
    """(start, stop) of the runs of True of at least `length` elements."""
    at = np.flatnonzero(mask)
    starts, stops = at[np.diff(at, prepend=-2) > 1], at[np.diff(at, append=len(mask) + 1) > 1] + 1
    found = stops - starts >= length
    return list(zip(starts[found].tolist(), stops[found].tolist(), strict=True))


def _share(mask: np.ndarray) -> float:
    return float(mask.mean()) if len(mask) else 0.0
