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
    """Context manager: the tracer records the forwards of vLLM's model runner.

    With asynchronous scheduling, vLLM's host does not know a sampled token yet when the next step runs and stores -1
    for it. Therefore the token ids of all forwards are remembered here.
    """
    seen: dict[str, dict[int, int]] = {}  # token ids by request and position

    def expect(ids: Tensor) -> None:
        """Tell the tracer the tokens of each request of the current batch. ids: (T,) token ids of its rows."""
        batch, starts, tokens = model_runner.input_batch, model_runner.query_start_loc.np, ids.tolist()
        contexts = []
        for index, name in enumerate(batch.req_ids[: batch.num_reqs]):
            row, stop = int(starts[index]), int(starts[index + 1])
            position = int(batch.num_computed_tokens_cpu[index])
            own = seen.setdefault(name, {})
            own.update(enumerate(tokens[row:stop], position))
            known = batch.token_ids_cpu[index, :position].tolist()
            before = [own.get(at, token) for at, token in enumerate(known)]
            contexts.append(Context(row, position, before + tokens[row:stop]))
        tracer.expect(contexts)

    name = "_determine_batch_execution_and_padding"
    eager = partial(getattr(model_runner, name), force_eager=True)
    with (
        patch.object(model_runner, name, eager),
        patch.object(policy, "before_batch", expect),
        policy.decoder.noting(tracer),
    ):
        yield
