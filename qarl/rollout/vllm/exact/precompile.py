"""Compiles the kernels of the policy's forward in parallel before vLLM runs it, which would compile them one by one.

Launches of the batches that vLLM is about to run are recorded instead of run: the batch that measures memory, prefills,
decodes beside a prefill, the decodes that CUDA graphs are captured for, and sampling. Others compile when needed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from qarl_kernels.attention import PAGE
from torch import Tensor

from qarl.policy.attention import Attention

if TYPE_CHECKING:
    from qarl.rollout.vllm.exact.model import ExactModel

THREADS = 16  # at most; the Python part of a compilation holds the interpreter's lock
logger = logging.getLogger("vllm.qarl")


@torch.inference_mode()
def precompile(model_runner: Any) -> None:
    """Compile for an `ExactModel` that holds its weights. A failure is logged, and kernels compile when needed."""
    policy: ExactModel = model_runner.get_model()
    if not policy.fused:
        return
    device: torch.device = model_runner.device
    threads = min(len(os.sched_getaffinity(0)), THREADS)
    try:
        from qarl_kernels.ahead import compile_ahead  # uses parts of Triton that another version may lack

        count = compile_ahead(lambda: run_batches(policy, model_runner.vllm_config, device), device, threads)
        logger.info("%d kernels compiled ahead, by %d threads", count, threads)
    except Exception as error:  # of Triton, or for want of memory
        logger.warning("kernels are compiled when they are needed: %s: %s", type(error).__name__, error)


def run_batches(policy: ExactModel, config: Any, device: torch.device) -> None:
    """Run the forwards and the sampling that vLLM is about to run. config: vLLM's."""
    from qarl_kernels.draw import exponential_  # imports Triton

    scheduler, context = config.scheduler_config, config.model_config.max_model_len
    graphs = config.compilation_config.cudagraph_mode.has_full_cudagraphs()
    sizes = {scheduler.max_num_seqs, *(config.compilation_config.cudagraph_capture_sizes or () if graphs else ())}
    drawn = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    for rows, attention in _batches(policy, sorted(sizes), scheduler.max_num_batched_tokens, context, device):
        hidden = policy.run(torch.zeros(rows, dtype=torch.int64, device=device), attention)
        logits = policy.pop_distribution(policy.compute_logits(hidden[:drawn])).logits
    zeros = torch.zeros(2, len(logits), dtype=torch.int64, device=device)
    exponential_(torch.empty_like(logits, memory_format=torch.contiguous_format), *zeros)


def _batches(
    policy: ExactModel, sizes: list[int], most: int, context: int, device: torch.device
) -> Iterator[tuple[int, Attention]]:
    """(rows, attention) of the memory measurement, of prefills of up to `most` rows, and of decodes of all sizes."""
    from qarl.policy.fused_attention import DecodeAttention, PagedAttention

    pages = policy.pages()

    def decode(rows: int, longest: int) -> DecodeAttention:
        positions = torch.zeros(rows, dtype=torch.int64, device=device)
        return DecodeAttention(positions, positions, _table(rows, longest, device), positions.int(), longest, pages)

    def prefill(rows: int, beside: int = 0, position: int = 0) -> tuple[int, PagedAttention]:
        """New sequences, with decodes beside them of tokens at this position."""
        whole, rest = divmod(rows - beside, context)
        begun = [context] * whole + [rest] * (rest > 0)
        counts, positions = np.array(begun + [1] * beside), np.array([0] * len(begun) + [position] * beside)
        return rows, PagedAttention.of_tables(counts, positions, _table(len(counts), context, device), pages)

    yield most, decode(most, 1)
    rows = most
    while rows > sizes[-1]:  # products choose their tiles by the rows
        yield prefill(rows)
        rows //= 2
    beside = min(sizes[-1], most - 1)
    if beside > 0:
        yield prefill(most, 1, context - 1)  # whose keys several programs share
        yield prefill(most, beside)
    for rows in sizes:
        yield rows, decode(rows, context)


def _table(rows: int, length: int, device: torch.device) -> Tensor:
    return torch.zeros(rows, -(-length // PAGE), dtype=torch.int32, device=device)
