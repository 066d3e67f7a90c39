"""A trace of vLLM's forwards: whose rows its batches have, with every operation run as it is, in no CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from qarl.policy.trace import Context, Tracer
from qarl.rollout.vllm.exact.model import Forward


@contextmanager
def traced(model_runner: Any, policy: Forward, tracer: Tracer) -> Iterator[None]:
    """Inside, forwards of the model runner's requests are told to the tracer."""
    rows = Rows(model_runner)
    name = "_determine_batch_execution_and_padding"
    setattr(model_runner, name, partial(getattr(model_runner, name), force_eager=True))
    try:
        with policy.traced(tracer, rows.contexts):
            yield
    finally:
        delattr(model_runner, name)  # the class's own is there again


class Rows:
    """Whose tokens the rows of vLLM's batches are.

    Where vLLM schedules ahead, its host has not seen a drawn token when it runs, and keeps -1 in its place; what ran
    before is remembered here.
    """

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner
        self._seen: dict[str, dict[int, int]] = {}

    def contexts(self, ids: Tensor) -> list[Context]:
        """Of the batch that runs now. ids: (T,) tokens of its rows."""
        batch, tokens = self._runner.input_batch, ids.tolist()
        starts = self._runner.query_start_loc.np
        found = []
        for index, name in enumerate(batch.req_ids[: batch.num_reqs]):
            row, stop = int(starts[index]), int(starts[index + 1])
            position = int(batch.num_computed_tokens_cpu[index])
            seen = self._seen.setdefault(name, {})
            seen.update(enumerate(tokens[row:stop], position))
            known = batch.token_ids_cpu[index, :position].tolist()
            before = [seen.get(place, token) for place, token in enumerate(known)]
            found.append(Context(row, position, before + tokens[row:stop]))
        return found
