"""Compiles the kernels of the policy's forward in parallel, before vLLM's warm-up would compile them one by one.

The forwards that vLLM is about to run are run with launches recorded instead of executed: memory profiling, prefills,
decodes in the same batch as a prefill, the decodes that CUDA graphs are captured for, and sampling. All other kernels
are compiled when they are first launched.
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

THREADS = 16  # maximum; more do not help, because the Python part of a compilation holds the GIL
logger = logging.getLogger("vllm.qarl")


@torch.inference_mode()
def precompile(model_runner: Any) -> None:
    """Compile the kernels of an `ExactModel` with loaded weights. A failure is logged and otherwise ignored."""
    policy: ExactModel = model_runner.get_model()
    if not policy.fused:
        return
    device: torch.device = model_runner.device
    threads = min(len(os.sched_getaffinity(0)), THREADS)
    try:
        from qarl_kernels.ahead import compile_ahead  # uses parts of Triton that another version may lack

        count = compile_ahead(lambda: run_batches(policy, model_runner.vllm_config, device), device, threads)
        logger.info("%d kernels compiled in advance by %d threads", count, threads)
    except Exception as error:  # from Triton, or out of memory
        logger.warning("kernels are compiled when they are needed: %s: %s", type(error).__name__, error)


def run_batches(policy: ExactModel, config: Any, device: torch.device) -> None:
    """Run the forwards and the sampling that vLLM is about to run. config: vLLM's configuration."""
    from qarl_kernels.draw import exponential_  # imports Triton

    scheduler, context = config.scheduler_config, config.model_config.max_model_len
    graphs = config.compilation_config.cudagraph_mode.has_full_cudagraphs()
    sizes = {scheduler.max_num_seqs, *(config.compilation_config.cudagraph_capture_sizes or () if graphs else ())}
    sampled = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    for rows, attention in _batches(policy, sorted(sizes), scheduler.max_num_batched_tokens, context, device):
        hidden = policy.run(torch.zeros(rows, dtype=torch.int64, device=device), attention)
        logits = policy.pop_distribution(policy.compute_logits(hidden[:sampled])).logits
    zeros = torch.zeros(2, len(logits), dtype=torch.int64, device=device)
    exponential_(torch.empty_like(logits, memory_format=torch.contiguous_format), *zeros)


def _batches(
    policy: ExactModel, sizes: list[int], max_rows: int, context: int, device: torch.device
) -> Iterator[tuple[int, Attention]]:
    """Yield (rows, attention) of memory profiling, prefills of up to `max_rows` rows, and decodes of all sizes."""
    from qarl.policy.fused_attention import DecodeAttention, PagedAttention

    pages = policy.pages()

    def decode(rows: int, longest: int) -> DecodeAttention:
        positions = torch.zeros(rows, dtype=torch.int64, device=device)
        return DecodeAttention(positions, positions, _table(rows, longest, device), positions.int(), longest, pages)

    def prefill(rows: int, beside: int = 0, position: int = 0) -> tuple[int, PagedAttention]:
        """Return new sequences that fill the rows, and `beside` decodes of tokens at `position` in the same batch."""
        whole, rest = divmod(rows - beside, context)
        begun = [context] * whole + [rest] * (rest > 0)
        counts, positions = np.array(begun + [1] * beside), np.array([0] * len(begun) + [position] * beside)
        return rows, PagedAttention.of_tables(counts, positions, _table(len(counts), context, device), pages)

    yield max_rows, decode(max_rows, 1)
    rows = max_rows
    while rows > sizes[-1]:  # products select their tile sizes by the number of rows
        yield prefill(rows)
        rows //= 2
    beside = min(sizes[-1], max_rows - 1)
    if beside > 0:
        yield prefill(max_rows, 1, context - 1)  # its keys are split over several programs
        yield prefill(max_rows, beside)
    for rows in sizes:
        yield rows, decode(rows, context)


def _table(rows: int, length: int, device: torch.device) -> Tensor:
    return torch.zeros(rows, -(-length // PAGE), dtype=torch.int32, device=device)
