"""Decoding on a GPU: a CUDA graph's replay has the learner's bits, whatever its tensors hold by then."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from kernel_oracles import to_cache
from policy_models import make_policy, tokens
from products import random
from qarl_kernels.flash import decode
from qarl_kernels.flash.forward import attention_forward
from qarl_kernels.flash.layout import packed_layout
from qarl_kernels.flash.paged import decode_attention
from qarl_kernels.logprob import Truncation, distribution, token_logprobs
from torch import Tensor

from qarl.policy.fused_attention import DecodeAttention, PagedAttention
from qarl.policy.policy import Policy

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
FP8 = torch.float8_e4m3fn
SCHEMES = [("bf16", None), ("w4a16", 32), ("w8a8", None), ("fp8", None), ("fp8_block", None), ("w4a8", 32)]
TRUNCATIONS = [
    Truncation(),
    Truncation(0.7),
    Truncation(1.2, min_p=0.02),
    Truncation(top_k=20),
    Truncation(0.9, top_k=50, top_p=0.9, min_p=0.001),
]


def captured(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of the call, and what it writes its result to. The call runs twice before: kernels are compiled."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


class Batch:
    """Sequences of a policy in pages of 64 of caches full of NaN, some rows of which are run by a graph."""

    def __init__(self, policy: Policy, lengths: list[int], rows: int) -> None:
        self.sampler = policy.sampler
        self.ids = [tokens(length, seed) for seed, length in enumerate(lengths)]
        self.states = [self.sampler.states([ids]) for ids in self.ids]
        config, counts = policy.config, [-(-length // 64) for length in lengths]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist()
        self.pages = [[order.pop() for _ in range(count)] for count in counts]
        shape = (sum(counts), config.num_key_value_heads, 64, config.head_dim)
        self.caches = [
            tuple(torch.full(shape, torch.nan, dtype=BF16, device=CUDA) for _ in "kv")
            for _ in range(config.num_hidden_layers)
        ]
        self.token, self.positions = (torch.zeros(rows, dtype=torch.int64, device=CUDA) for _ in "ab")
        self.slots = torch.full_like(self.token, -1)
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=CUDA)
        self.table = torch.zeros(rows, max(counts), dtype=torch.int32, device=CUDA)
        tensors = self.positions, self.slots, self.table, self.lengths
        self.attention = DecodeAttention(*tensors, 64 * max(counts), self.caches)

    def prefill(self, counts: list[int]) -> None:
        table = torch.zeros(len(counts), self.table.shape[1], dtype=torch.int32)
        for line, pages in zip(table, self.pages, strict=True):
            line[: len(pages)] = torch.tensor(pages)
        starts = np.zeros(len(counts), np.int64)
        attention = PagedAttention.of_tables(np.array(counts), starts, table.to(CUDA), self.caches)
        ids = [token for ids, count in zip(self.ids, counts, strict=True) for token in ids[:count]]
        found = self.sampler.hidden_states(torch.tensor(ids, device=CUDA), attention)
        expected = torch.cat([states[:count] for states, count in zip(self.states, counts, strict=True)])
        assert torch.equal(found, expected)

    def fill(self, rows: list[tuple[int, int] | None]) -> None:
        """Per row the sequence and position to run; None: an empty row."""
        for row, filled in enumerate(rows):
            sequence, position = filled or (0, 0)
            pages = self.pages[sequence]
            self.token[row] = self.ids[sequence][position]
            self.positions[row] = position
            self.slots[row] = pages[position // 64] * 64 + position % 64 if filled else -1
            self.lengths[row] = position + 1 if filled else 0
            self.table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)

    def hidden(self) -> Tensor:
        return self.sampler.hidden_states(self.token, self.attention)


@pytest.mark.parametrize(("scheme", "group"), SCHEMES)
def test_replays_have_the_learners_bits_whatever_the_tensors_hold(tiny_model, scheme, group) -> None:
    policy = make_policy(tiny_model("qwen3", max_position_embeddings=2048), scheme, BF16, group, CUDA)
    policy.sampler.install(policy.current)
    batch = Batch(policy, [1300, 70, 130], 4)
    batch.prefill([1020, 64, 1])
    graph, hidden = captured(batch.hidden)  # all rows are empty
    drawn = torch.zeros(4, dtype=torch.int64, device=CUDA)
    log_graph, logp = captured(lambda: policy.sampler.distribution(hidden, Truncation(0.8)).logprobs(drawn))
    at = [1020, 64, 1]
    for turn in range(8):
        order = [[0, 1, 2, None], [None, 2, 0, 1], [0, None, None, 2], [2, 0, None, None]][turn % 4]
        rows = [None if sequence is None else (sequence, at[sequence]) for sequence in order]
        batch.fill(rows)
        drawn.copy_(torch.arange(turn, turn + 4))
        graph.replay()
        log_graph.replay()
        assert hidden.isfinite().all()
        for row, filled in enumerate(rows):
            if filled is not None:
                sequence, position = filled
                at[sequence] += 1
                expected = batch.states[sequence][position : position + 1]
                assert torch.equal(hidden[row : row + 1], expected), (turn, row)
                learner = policy.sampler.logprobs(expected, drawn[row : row + 1], Truncation(0.8))
                assert torch.equal(logp[row : row + 1], learner), (turn, row)
    assert at[0] > 1024, "a second chunk of keys was read"


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (16, 8, 128), (9, 3, 64), (8, 2, 256)])
@pytest.mark.parametrize(("window", "held"), [(None, BF16), (1500, BF16), (None, FP8), (1500, FP8)])
def test_decode_has_the_packed_bits_however_chunks_are_shared_out(
    monkeypatch, heads, kv_heads, dim, window, held
) -> None:
    lengths = [5000, 1, 1024, 1025, 300, 64, 2049]
    total = sum(lengths)
    q, k, v = (random(total, n, dim, seed=n, device=CUDA, dtype=BF16) for n in (heads, kv_heads, kv_heads))
    k, v = k.to(held).to(BF16), v.to(held).to(BF16)
    packed = attention_forward(q, k, v, packed_layout([(n, []) for n in lengths], CUDA), dim**-0.5, window)[0]
    counts = [-(-n // 64) for n in lengths]
    pages = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).split(counts)
    both = torch.full((sum(counts), 64, 2, kv_heads, dim), torch.nan, dtype=BF16, device=CUDA)
    table = torch.zeros(len(lengths) + 1, 128, dtype=torch.int32)
    first = 0
    for s, length in enumerate(lengths):
        table[s, : counts[s]] = pages[s]
        at = torch.arange(length)
        for which, values in enumerate((k, v)):
            both[pages[s][at // 64].to(CUDA), (at % 64).to(CUDA), which] = values[first : first + length]
        first += length
    last = torch.tensor(lengths).cumsum(0).to(CUDA) - 1
    queries = torch.cat([q[last], q[:1]])
    there = torch.tensor([*lengths, 0], dtype=torch.int32, device=CUDA)
    both = to_cache(both.to(held)) if held == FP8 else both
    caches = [both[:, :, which].transpose(1, 2) for which in range(2)]
    for programs in (0, 264, 528, 10_000):
        monkeypatch.setattr(decode, "PROGRAMS", programs)
        out = decode_attention(queries, *caches, table.to(CUDA), there, dim**-0.5, window, 8192)
        assert torch.equal(out[:-1], packed[last]) and out[-1].eq(0).all(), programs
    alone = decode_attention(queries[3:4], *caches, table[3:4].to(CUDA), there[3:4], dim**-0.5, window, 1025)
    assert torch.equal(alone, packed[last[3:4]])


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
@pytest.mark.parametrize(("vocabulary", "features"), [(151_936, 1024), (49_152, 576), (50_257, 768), (1001, 100)])
def test_a_distribution_has_the_learners_log_probs(vocabulary, features, truncation) -> None:
    hidden = random(300, features, seed=1, device=CUDA, dtype=BF16)
    weight = random(vocabulary, features, seed=2, device=CUDA, dtype=BF16) * (3 * features**-0.5)
    targets = torch.randint(0, vocabulary, (300,), generator=torch.Generator().manual_seed(3)).to(CUDA)
    targets[::2] = (hidden @ weight.t()).argmax(-1)[::2]
    expected = token_logprobs(hidden, None, weight, targets, truncation, 128)[0]
    if truncation.active:
        assert torch.isneginf(expected).any() and expected.isfinite().any()
    for rows in (1, 8, 64, 129, 300):
        found = distribution(hidden[:rows], weight, truncation)
        assert torch.equal(found.logprobs(targets[:rows]), expected[:rows]), rows
        every = found.all_logprobs()
        assert torch.equal(every.gather(-1, targets[:rows, None])[:, 0], expected[:rows]), rows
        torch.testing.assert_close(every.exp().sum(-1), torch.ones(rows, device=CUDA), rtol=1e-4, atol=0)
