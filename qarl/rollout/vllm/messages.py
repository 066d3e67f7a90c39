"""Orders to the sampler's process and its answers as messages, with typed and validated fields.

Orders: start, publish, score, generate, sleep, wake, abort. Answers: done, failed, progress, aborted. Token ids,
log-probs and experts are arrays beside the JSON in native byte order: both ends run on one machine.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from qarl.inputs.schema import schema_fault
from qarl.rollout.vllm.settings import Drawing, Request, Response, SamplerSettings
from qarl.rollout.vllm.wire import Message, WireError
from qarl.text import visible
from qarl.types import FinishReason
from qarl.weight_sync.connection import SamplerFault
from qarl.weight_sync.fingerprints import Fingerprint
from qarl.weight_sync.transport import ReceiverPlan
from qarl.weight_sync.update import WeightUpdate, dump_update, load_update
from qarl.weight_sync.verify import PublishError

TOKEN, LOGPROB = "i", "d"  # codes of `array`: int32, float64
BYTES_PER_TOKEN = array(TOKEN).itemsize + array(LOGPROB).itemsize

T = TypeVar("T")
Scores = list[list[float]]


@dataclass(frozen=True)
class _Capabilities:
    """See `Host.capabilities`."""

    proved_frac: float
    notes: list[str]
    phases: dict[str, float]


@dataclass(frozen=True)
class _Generate:
    drawing: Drawing
    lengths: list[int]
    seeds: list[int]


@dataclass(frozen=True)
class _Drawn:
    lengths: list[int]
    finish_reasons: list[FinishReason]
    stopped_by: list[int | str | None]


_START = TypeAdapter(tuple[SamplerSettings, dict[str, Fingerprint], ReceiverPlan])
_CAPABILITIES, _PUBLISHED = TypeAdapter(_Capabilities), TypeAdapter(tuple[dict[str, float], Scores])
_GENERATE, _DRAWN = TypeAdapter(_Generate), TypeAdapter(_Drawn)
_SEQUENCES, _SCORES, _LEVEL = TypeAdapter(list[list[int]]), TypeAdapter(Scores), TypeAdapter(int)
_FREED, _FAILURE, _PROGRESS = TypeAdapter(int | None), TypeAdapter(tuple[str, bool]), TypeAdapter(tuple[int, int])


@contextmanager
def _checked(message: Message) -> Iterator[None]:
    """Turn validation errors of a body into WireError."""
    try:
        yield
    except ValidationError as error:
        raise WireError(f"{message.kind}: {schema_fault(error)}") from None


def _read(adapter: TypeAdapter[T], message: Message) -> T:
    with _checked(message):
        return adapter.validate_python(message.body)


# --- orders: the learner's side writes, the sampler's reads ------------------------------------------------------


def order(operation: str, payload: Any) -> Message:
    """The message of an operation; see `worker.perform` for the payloads.

    That of start: (settings, fingerprints of the snapshot in the checkpoint, plan of the receiver).
    """
    match operation:
        case "start":
            return Message("start", _START.dump_python(payload, mode="json"))
        case "publish":
            assert isinstance(payload, WeightUpdate)
            return Message("publish", dump_update(payload))
        case "generate":
            requests, drawing = payload
            lengths, tokens = [len(request.token_ids) for request in requests], array(TOKEN)
            for request in requests:
                tokens.extend(request.token_ids)
            asked = _Generate(drawing, lengths, [request.seed for request in requests])
            return Message("generate", _GENERATE.dump_python(asked, mode="json"), tokens.tobytes())
    return Message(operation, payload)


def read_order(message: Message) -> Any:
    """The payload of an order."""
    match message.kind:
        case "start":
            return _read(_START, message)
        case "publish":
            with _checked(message):
                return load_update(message.body)
        case "generate":
            asked = _read(_GENERATE, message)
            if len(asked.seeds) != len(asked.lengths):
                raise WireError(f"{message.kind}: {len(asked.seeds)} seeds of {len(asked.lengths)} requests")
            (tokens,) = _arrays(message, (TOKEN,), sum(asked.lengths))
            prompts = _split(tokens, asked.lengths)
            requests = [Request(prompt, seed) for prompt, seed in zip(prompts, asked.seeds, strict=True)]
            return requests, asked.drawing
        case "score":
            return _read(_SEQUENCES, message)
        case "sleep":
            return _read(_LEVEL, message)
        case "wake" | "abort":
            return None
    raise WireError(f"an order {message.kind[:40]!r}")


# --- answers: the sampler's side writes, the learner's reads -----------------------------------------------------


def done(operation: str, result: Any) -> Message:
    """The answer to an executed order."""
    if operation != "generate":
        return Message("done", result)
    tokens, logprobs = array(TOKEN), array(LOGPROB)
    for response in result:
        tokens.extend(response.token_ids)
        logprobs.extend(response.logprobs)
    lengths = [len(response.token_ids) for response in result]
    drawn = _Drawn(lengths, [response.finish_reason for response in result], [r.stopped_by for r in result])
    routing = b"".join(response.routing for response in result)
    return Message("done", asdict(drawn), tokens.tobytes() + logprobs.tobytes() + routing)


def data_limit(operation: str, payload: Any) -> int:
    """Most bytes of arrays in the answer to an order."""
    if operation != "generate":
        return 0
    requests, drawing = payload
    prompts = sum(len(request.token_ids) for request in requests)
    drawn = len(requests) * drawing.max_tokens
    return drawn * BYTES_PER_TOKEN + (prompts + drawn) * drawing.routing


def read_done(operation: str, payload: Any, message: Message) -> Any:
    """The result of an order; raises WireError if it has another number of parts than the order."""
    match operation:
        case "start":
            return asdict(_read(_CAPABILITIES, message))
        case "publish":
            seconds, scores = _read(_PUBLISHED, message)
            return seconds, _scores_of(payload.canary, scores)
        case "score":
            return _scores_of(payload, _read(_SCORES, message))
        case "generate":
            return _responses(*payload, message)
        case "sleep":
            return _read(_FREED, message)
    return None


def failed(text: str, refused: bool) -> Message:
    """The answer to an order that failed. refused: Whether it was a publish that the sampler refused."""
    return Message("failed", [visible(text, keep_newlines=True), refused])


def read_failed(message: Message) -> SamplerFault | PublishError:
    text, refused = _read(_FAILURE, message)
    return PublishError(text) if refused else SamplerFault(text)


def read_progress(message: Message) -> tuple[int, int]:
    """(finished responses, their tokens)."""
    return _read(_PROGRESS, message)


def _responses(requests: Sequence[Request], drawing: Drawing, message: Message) -> list[Response]:
    drawn = _read(_DRAWN, message)
    lengths = drawn.lengths
    if not len(requests) == len(lengths) == len(drawn.finish_reasons) == len(drawn.stopped_by):
        raise WireError(f"{len(lengths)} responses to {len(requests)} requests")
    sizes = [
        max(len(request.token_ids) + length - 1, 0) * drawing.routing
        for request, length in zip(requests, lengths, strict=True)
    ]
    tokens, logprobs = _arrays(message, (TOKEN, LOGPROB), sum(lengths), sum(sizes))
    told = accumulate(sizes, initial=len(message.data) - sum(sizes))
    routing = [bytes(message.data[start:end]) for start, end in pairwise(told)]
    return [
        Response(*parts)
        for parts in zip(
            _split(tokens, lengths),
            _split(logprobs, lengths),
            drawn.finish_reasons,
            drawn.stopped_by,
            routing,
            strict=True,
        )
    ]


def _scores_of(sequences: Sequence[Sequence[int]], scores: Scores) -> Scores:
    if [len(sequence) - 1 for sequence in sequences] != [len(logprobs) for logprobs in scores]:
        raise WireError("log-probs of other tokens than were to be scored")
    return scores


def _arrays(message: Message, codes: Sequence[str], length: int, rest: int = 0) -> list[array[Any]]:
    """The arrays of `length` elements each in the message's data, without the last `rest` bytes."""
    arrays = [array(code) for code in codes]
    ends = list(accumulate((length * each.itemsize for each in arrays), initial=0))
    if len(message.data) != ends[-1] + rest:
        raise WireError(f"{message.kind}: {len(message.data):,} bytes of arrays instead of {ends[-1] + rest:,}")
    for each, (start, end) in zip(arrays, pairwise(ends), strict=True):
        each.frombytes(memoryview(message.data)[start:end])
    return arrays


def _split(values: array[Any], lengths: Sequence[int]) -> list[list[Any]]:
    if lengths and min(lengths) < 0:
        raise WireError("an array of a negative length")
    return [values[start:end].tolist() for start, end in pairwise(accumulate(lengths, initial=0))]
