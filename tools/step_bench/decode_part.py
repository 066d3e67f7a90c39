"""One decode forward of a batch: hidden states, and the distribution that its tokens are drawn from.

On a GPU both run as replays of a CUDA graph, whose bound on the context is that of an engine's graphs, not what the
batch has. Without one the policy's plain layers run, so that the tool can be tried.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import product

import torch
from model_sizes import Shape
from qarl_kernels.attention import PAGE
from qarl_kernels.logprob import Truncation
from torch import Tensor
from vllm_bench.models import policy_of, quant_of, random_masters

from qarl.policy.attention import Attention, Caches, Span
from qarl.policy.policy import Policy
from step_bench.measure import Record, timed, top_kernels

CACHE_BYTES = 32 << 30  # of all layers; beyond it some share theirs, which is then far larger than a GPU's own cache
SWEPT = 16  # calls of a kernel in one graph


def decode_records(options: argparse.Namespace, shape: Shape, device: torch.device) -> Iterator[Record]:
    """Of each batch and context: seconds, tokens/s, and TB/s of the weights and keys and values that are read."""
    quant = quant_of(options.scheme, shape.group_size, kv_cache_dtype=options.kv_cache_dtype)
    bound = max(*options.context, options.bound)
    policy = policy_of(shape.config(), quant, random_masters(options.seed, device), 0, device, bound)
    policy.sampler.install(policy.current)
    head = policy.sampler.weights.head
    layers = sum(tensor.nbytes for name, tensor in policy.current.tensors.items() if name.startswith("model.layers."))
    for batch in options.batch:
        for context in options.context:
            labels: Record = {"batch": batch, "context": context, "bound": bound}
            labels["kv_cache_dtype"] = options.kv_cache_dtype
            try:
                run = Decode(policy, shape, batch, context, bound, device)
                values = (
                    2 * shape.layers * batch * context * shape.kv_heads * shape.head_dim * run.caches[0][0].itemsize
                )
                whole = layers + head.nbytes + values
                for what, call, read in (
                    ("decode", run.step, whole),
                    ("states", run.states, whole - head.nbytes),
                    ("distribution", run.distribution, head.nbytes),
                ):
                    yield labels | {"what": what} | measured(call, options, device, batch, read)
            except torch.OutOfMemoryError as error:
                yield labels | {"error": str(error).splitlines()[0]}
                continue
            if options.sweep and device.type == "cuda":
                yield from (labels | record for record in swept(run, shape, options, device))
            del run


def measured(
    call: Callable[[], object], options: argparse.Namespace, device: torch.device, batch: int, read: int
) -> Record:
    """Time of a call, on a GPU replayed. read: bytes."""
    replay = captured(call) if device.type == "cuda" else call
    found = timed(replay, device, options.warmup, options.iterations)
    found |= {"tokens_per_s": batch / found["seconds"], "tb_per_s": read / found["seconds"] / 1e12}
    if device.type == "cuda":
        found["eager_host_seconds"] = timed(call, device, 1, options.iterations)["host_seconds"]
    if options.kernels:
        found["kernels"] = top_kernels(replay, device, options.kernels)
    return found


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph; it ran before, so that kernels are compiled."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


class Decode:
    """A batch whose sequences all have `context` tokens, the last of which is run."""

    def __init__(
        self, policy: Policy, shape: Shape, batch: int, context: int, bound: int, device: torch.device
    ) -> None:
        self.sampler, self.device = policy.sampler, device
        count = -(-context // PAGE)
        held = self.sampler.cache_dtype if device.type == "cuda" else torch.float32
        self.caches = make_caches(shape, batch * count, held, device)
        generator = torch.Generator().manual_seed(0)
        pages = torch.randperm(batch * count, generator=generator).view(batch, count)
        self.ids = torch.randint(3, shape.vocabulary, (batch,), generator=generator).to(device)
        self.attention = self._attention(pages, context, bound)
        self.hidden = self.states()

    def _attention(self, pages: Tensor, context: int, bound: int) -> Attention:
        batch, count = pages.shape
        if not self.sampler.weights.fused:
            spans = [Span(row, 1, context - 1, pages[row].tolist()) for row in range(batch)]
            return self.sampler.paged(spans, self.caches)
        from qarl.policy.fused_attention import DecodeAttention  # imports Triton, which the CPU does not need

        table = torch.zeros(batch, -(-bound // PAGE), dtype=torch.int32)
        table[:, :count] = pages
        return DecodeAttention(
            positions=torch.full((batch,), context - 1, device=self.device),
            slots=(pages[:, -1] * PAGE + (context - 1) % PAGE).to(self.device),
            page_table=table.to(self.device),
            lengths=torch.full((batch,), context, dtype=torch.int32, device=self.device),
            max_length=bound,
            caches=self.caches,
        )

    def states(self) -> Tensor:
        return self.sampler.hidden_states(self.ids, self.attention)

    def distribution(self) -> Tensor:
        return self.sampler.distribution(self.hidden, Truncation()).logprobs(self.ids)

    def step(self) -> Tensor:
        return self.sampler.distribution(self.states(), Truncation()).logprobs(self.ids)


def make_caches(shape: Shape, pages: int, dtype: torch.dtype, device: torch.device) -> Caches:
    """Per layer keys and values (pages, H_kv, PAGE, D) of random numbers."""
    size = (pages, shape.kv_heads, PAGE, shape.head_dim)
    own = 2 * dtype.itemsize * size[0] * size[1] * size[2] * size[3]
    made = []
    for _ in range(max(1, min(shape.layers, CACHE_BYTES // own))):
        k, v = (torch.randn(size, device=device, dtype=torch.bfloat16).to(dtype) for _ in "kv")
        made.append((k, v))
    return [made[layer % len(made)] for layer in range(shape.layers)]


def swept(run: Decode, shape: Shape, options: argparse.Namespace, device: torch.device) -> Iterator[Record]:
    """Attention of a layer alone with each of its candidates; all must give the same bits."""
    from qarl_kernels.flash import decode
    from qarl_kernels.flash.layout import padded
    from qarl_kernels.flash.paged import decode_attention

    attention, scale = run.attention, shape.head_dim**-0.5
    q = torch.randn(len(run.ids), shape.heads, shape.head_dim, device=device, dtype=torch.bfloat16)

    def attend(layer: int) -> Tensor:
        where = attention.page_table, attention.lengths, scale, None, attention.max_length
        return decode_attention(q, *run.caches[layer % len(run.caches)], *where)

    head, expected = padded(shape.head_dim), attend(0)
    read = 2 * run.caches[0][0].itemsize * shape.kv_heads * shape.head_dim * int(attention.lengths.sum())
    tiles = decode.tiles_of(q, run.caches[0][0])
    before = tiles[head], decode.PROGRAMS
    try:
        for candidate in product((1, 2, 4, 8), (3, 5, 7, 9)):  # warps, stages
            for programs in (0, 264, 528, 1056):
                tiles[head], decode.PROGRAMS = candidate, programs
                record: Record = {"what": "attention", "candidate": [*candidate, programs]}
                try:
                    same = torch.equal(attend(0), expected)
                    found = timed(
                        captured(lambda: [attend(i) for i in range(SWEPT)]), device, options.warmup, options.iterations
                    )
                except Exception as error:  # of the compiler, where a candidate does not fit
                    yield record | {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
                    continue
                seconds = found["seconds"] / SWEPT
                yield record | {"seconds": seconds, "tb_per_s": read / seconds / 1e12, "same": same}
    finally:
        tiles[head], decode.PROGRAMS = before
