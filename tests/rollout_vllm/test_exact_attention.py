"""The policy's attention over vLLM's batches and KV cache, without a running vLLM."""

from types import SimpleNamespace

import pytest
import torch
from needs_vllm import needs_vllm
from qarl_kernels.attention import PAGE
from qarl_kernels.launch import INTERPRETED

pytestmark = [
    needs_vllm,
    pytest.mark.slow,  # importing vLLM
    pytest.mark.skipif(not INTERPRETED or torch.cuda.is_available(), reason="needs TRITON_INTERPRET=1, on a CPU"),
]
HEADS, DIM, CONTEXT = 2, 16, 512
CPU = torch.device("cpu")


def builder():
    """Return a metadata builder and its two layers, which vLLM lists in reverse order."""
    from qarl.rollout.vllm.exact.attention import AttentionBuilder, CachedLayer

    layers = [CachedLayer(index, HEADS, DIM, torch.bfloat16) for index in range(2)]
    for layer in layers:
        layer.kv_cache = torch.zeros(9, HEADS, PAGE, 2 * DIM, dtype=torch.bfloat16)
    compilation = SimpleNamespace(
        static_forward_context={"b": layers[1], "a": layers[0]},
        cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: True),
    )
    config = SimpleNamespace(compilation_config=compilation, model_config=SimpleNamespace(max_model_len=CONTEXT))
    made = AttentionBuilder(None, ["b", "a"], config, CPU)
    made._fused = True
    return made, layers


def batch(counts: list[int], lengths: list[int]) -> SimpleNamespace:
    """Return vLLM's metadata of a batch. counts, lengths: Number of new and of all tokens per sequence."""
    tables = torch.tensor([[3, 5, 1], [2, 4, 7], [6, 0, 0]], dtype=torch.int32)[: len(counts)]
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    positions = [p for c, n in zip(counts, lengths, strict=True) for p in range(n - c, n)]
    which = [i for i, c in enumerate(counts) for _ in range(c)]
    slots = [int(tables[i, p // PAGE]) * PAGE + p % PAGE for i, p in zip(which, positions, strict=True)]
    return SimpleNamespace(
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=len(counts),
        num_actual_tokens=sum(counts),
        max_query_len=max(counts),
        max_seq_len=max(lengths),
        block_table_tensor=tables,
        slot_mapping=torch.tensor(slots),
        positions=torch.tensor(positions),
    )


def test_decodes_read_the_tensors_that_vllm_keeps() -> None:
    made, layers = builder()
    asked = batch([1, 1, 1], [130, 64, 1])
    found = made.build(0, asked)
    assert found.max_length == CONTEXT
    given = (asked.positions, asked.slot_mapping, asked.block_table_tensor, asked.seq_lens)
    assert all(
        a is b for a, b in zip((found.positions, found.slots, found.page_table, found.lengths), given, strict=True)
    )
    for (keys, _), layer in zip(found.caches, layers, strict=True):  # in the order of the model's layers
        assert keys.data_ptr() == layer.kv_cache.data_ptr()


@pytest.mark.parametrize(("counts", "lengths"), [([1, 70, 3], [129, 70, 9]), ([5, 1, 1], [5, 192, 1])])
def test_a_mixed_batch_gives_the_bits_of_the_policys_own_spans(counts: list[int], lengths: list[int]) -> None:
    from qarl_kernels.rotary import Rotation

    from qarl.policy.fused_attention import sampler_attention
    from qarl.policy.pages import Span

    made, layers = builder()
    generator = torch.Generator().manual_seed(0)
    for layer in layers:  # earlier keys, and what other requests left
        layer.kv_cache.copy_(torch.randn(layer.kv_cache.shape, generator=generator))
    asked = batch(counts, lengths)
    spans, row = [], 0
    for count, length, table in zip(counts, lengths, asked.block_table_tensor.tolist(), strict=True):
        spans.append(Span(row, count, length - count, table[: -(-length // PAGE)]))
        row += count
    own = [tuple(part.clone() for part in layer.pages) for layer in layers]
    expected, found = sampler_attention(spans, CPU, own), made.build(0, asked)
    angles = torch.randn(CONTEXT, DIM, generator=generator).bfloat16()
    qkv = torch.randn(row, 4 * HEADS * DIM, generator=generator).bfloat16()
    outputs = []
    for attention in (expected, found):
        rotation = Rotation(2 * HEADS, HEADS, DIM, angles.cos(), angles.sin(), attention.positions, None, None, 1e-6)
        outputs.append(attention.forward(qkv, rotation, 1, 0.25, None)[0])
    assert torch.equal(*outputs)
    assert all(torch.equal(a, b) for a, b in zip(layers[1].pages, own[1], strict=True))
