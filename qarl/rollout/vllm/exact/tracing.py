"""Traces vLLM's forwards, without CUDA graphs, and tells the tracer which tokens the rows of a batch are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import Tensor

from qarl.policy.trace import Context, Tracer
from qarl.rollout.vllm.exact.model import ExactModel


@contextmanager
def traced(model_runner: Any, policy: ExactModel, tracer: Tracer) -> Iterator[None]:
    """Inside, the tracer records the forwards of vLLM's model runner."""
    rows = Rows(model_runner)
    name = "_determine_batch_execution_and_padding"
    eager = partial(getattr(model_runner, name), force_eager=True)
    expect = patch.object(policy, "before_batch", lambda ids: tracer.expect(rows.contexts(ids)))
    with patch.object(model_runner, name, eager), expect, policy.decoder.noting(tracer):
        yield


class Rows:
    """Finds the request and the tokens of the rows of vLLM's batches.

    With asynchronous scheduling, vLLM's host does not know a sampled token yet when the next step runs and stores -1
    for it. Therefore this class remembers the token ids of all forwards.
    """

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner
        self._seen: dict[str, dict[int, int]] = {}

    def contexts(self, ids: Tensor) -> list[Context]:
        """Return the contexts of the current batch. ids: (T,) token ids of its rows."""
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
