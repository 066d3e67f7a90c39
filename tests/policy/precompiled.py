"""`python precompiled.py MODEL [MODEL:fp8 ...]`: launches of `precompile` and of later forwards, by Triton key.

Prints JSON, see `main`. A process of its own: with TRITON_INTERPRET=1, which the test suite sets, kernels have no keys.
"""

import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from policy_models import make_policy
from qarl_kernels.attention import PAGE
from qarl_kernels.draw import exponential_
from qarl_kernels.head import fused_distribution
from qarl_kernels.launch import Launch, recording
from qarl_kernels.truncation import Distribution, Truncation
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

import qarl.policy.policy
from qarl.policy.attention import Attention
from qarl.policy.fused_attention import DecodeAttention, PagedAttention
from qarl.policy.pages import Caches
from qarl.policy.policy import Policy
from qarl.rollout.vllm.exact.precompile import run_batches

CPU = torch.device("cpu")
HOPPER = make_backend(GPUTarget("cuda", 90, 32))
CONTEXT, MOST, SEQUENCES = 2048, 96, 24


class Forward:
    """As much of `qarl.rollout.vllm.exact.model.ExactModel` as vLLM's start runs, of a policy of Triton kernels."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.head = policy, policy.sampler.weights.head.to(torch.bfloat16)
        self.logit_rows: list[int] = []

    def pages(self, count: int = 1) -> Caches:
        config = self.policy.model.config
        head_dim, dtype = config.head_dim, self.policy.sampler.cache_dtype
        made = [torch.zeros(count, config.num_key_value_heads, PAGE, 2 * head_dim, dtype=dtype)]
        made *= config.num_hidden_layers
        return [(cache[..., :head_dim], cache[..., head_dim:]) for cache in made]

    def run(self, ids: Tensor, attention: Attention) -> Tensor:
        return self.policy.sampler.hidden_states(ids, attention)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        self.logit_rows.append(len(hidden))
        self.found = fused_distribution(hidden.contiguous(), self.head, Truncation())  # `distribution`, on a GPU
        return self.found.logits

    def pop_distribution(self, logits: Tensor) -> Distribution:
        assert self.found.logits is logits
        return self.found


def vllm_config(graphs: bool) -> SimpleNamespace:
    mode = SimpleNamespace(has_full_cudagraphs=lambda: graphs)
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=SEQUENCES, max_num_batched_tokens=MOST),
        model_config=SimpleNamespace(max_model_len=CONTEXT),
        compilation_config=SimpleNamespace(cudagraph_mode=mode, cudagraph_capture_sizes=[1, 8, SEQUENCES]),
    )


@cache
def binder(kernel: Any) -> Any:
    return create_function_from_signature(kernel.signature, kernel.params, HOPPER)


def key_of(launch: Launch) -> str:
    """What `JITFunction.run` finds a compiled kernel by."""
    _, specialization, options = binder(launch.kernel)(**launch.arguments, **launch.options)
    return f"{launch.kernel.__name__} {specialization} {options}"


class Keys(list[Launch]):
    """Of launches, which are not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def append(self, launch: Launch) -> None:
        self.found.add(key_of(launch))


def tiny_policy(path: Path, kv_cache_dtype: str) -> Policy:
    """Of Triton kernels, with weights that are whatever memory held: kernels depend on no number."""
    with recording():
        policy = make_policy(path, "bf16", torch.bfloat16, kv_cache_dtype=kv_cache_dtype)
    assert policy.sampler.weights.fused
    return policy


def batches(forward: Forward) -> Iterator[None]:
    """Such as vLLM runs: decodes of graphs' sizes, a prefill and a chunk beside decodes, tokens drawn."""
    pages, table = forward.pages(9), torch.randint(9, (SEQUENCES + 2, CONTEXT // PAGE), dtype=torch.int32)
    positions = torch.arange(SEQUENCES) * 10
    for rows in (1, 8, SEQUENCES):
        of_rows = positions[:rows], positions[:rows] + PAGE, table[:rows], positions[:rows].int() + 1
        forward.compute_logits(forward.run(torch.full((rows,), 7), DecodeAttention(*of_rows, CONTEXT, pages)))
        yield
    for rows, decodes, at in ((93, 0, 0), (93, 1, 100), (93, 1, 1500), (50, 4, 1500), (40, 11, 100), (96, 24, 100)):
        counts, starts = np.array([rows - 19 - decodes, 19] + [1] * decodes), np.array([0, 70] + [at] * decodes)
        slots = torch.arange(int(counts.sum()))
        forward.run(slots, PagedAttention.of_tables(counts, starts, table[: len(counts)], pages, slots))
        yield
    for rows in (3, 8):
        exponential_(torch.empty(rows, forward.found.logits.shape[1]), *torch.zeros(2, rows, dtype=torch.int64))
        yield


def compared(forward: Forward) -> dict[str, Any]:
    """recorded, later: how many keys. new: those of launches that were not precompiled. logit_rows: of each precompiled
    distribution."""
    known, later = Keys(), Keys()
    with recording(collected=known):
        run_batches(forward, vllm_config(True), CPU)
    logit_rows = list(forward.logit_rows)
    with recording(collected=later):
        for _ in batches(forward):
            pass
    return {
        "recorded": len(known.found),
        "later": len(later.found),
        "new": sorted(later.found - known.found),
        "logit_rows": logit_rows,
    }


@torch.inference_mode()
def main(models: list[str]) -> None:
    """A line for each model, and one of the rows of distributions where there are no graphs."""
    qarl.policy.policy.use_kernels = lambda *_: True
    for model in models:
        path, _, kv_cache_dtype = model.partition(":")
        forward = Forward(tiny_policy(Path(path), kv_cache_dtype or "auto"))
        print(json.dumps(compared(forward)))
    forward.logit_rows.clear()
    with recording(collected=Keys()):
        run_batches(forward, vllm_config(False), CPU)
    print(json.dumps(forward.logit_rows))


if __name__ == "__main__":
    main(sys.argv[1:])
