"""The policy's attention on vLLM's KV cache.

vLLM assigns blocks of `PAGE` tokens to sequences. Once per step it calls the metadata builder, which creates the
attention object of the policy's decoder from vLLM's block tables, slots and lengths.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from qarl_kernels.attention import PAGE
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from qarl.policy.attention import Attention, paged
from qarl.policy.fused_attention import DecodeAttention, PagedAttention
from qarl.policy.pages import Caches, Span


class CachedLayer(AttentionLayerBase):
    """The KV cache of one layer.

    A layer with a sliding window also keeps the whole sequence, because all layers share one block table.

    Attributes:
        kv_cache: Set by vLLM: (P, H_kv, PAGE, 2 D), key and value of a token next to each other.
        pages: Views of its keys and values, (P, H_kv, PAGE, D) each.
    """

    def __init__(self, index: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.index, self.kv_heads, self.head_dim, self.dtype = index, kv_heads, head_dim, dtype
        self.kv_cache = torch.empty(0)

    @property
    def kv_cache(self) -> Tensor:
        return self._kv_cache

    @kv_cache.setter
    def kv_cache(self, given: Tensor) -> None:
        self._kv_cache = given
        self.pages = pages_of(given)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return PolicyAttention

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> FullAttentionSpec:
        assert vllm_config.cache_config.block_size == PAGE, "`sampler_settings` sets block_size to PAGE"
        return FullAttentionSpec(block_size=PAGE, num_kv_heads=self.kv_heads, head_size=self.head_dim, dtype=self.dtype)


def pages_of(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the keys and the values, (P, H_kv, PAGE, D) each, of a cache (P, H_kv, PAGE, 2 D)."""
    head_dim = cache.shape[-1] // 2
    return cache[..., :head_dim], cache[..., head_dim:]


class PolicyAttention(AttentionBackend):
    """Tells vLLM the shape of the KV cache and the metadata builder. It computes nothing."""

    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("no layer of vLLM computes attention")  # vLLM handles this error

    @staticmethod
    def get_builder_cls() -> type[AttentionBuilder]:
        return AttentionBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Return the shape that later versions of vLLM choose themselves."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size


class AttentionBuilder(AttentionMetadataBuilder[Any]):
    """Builds the attention object of each batch.

    Batches with one token per sequence only use device tensors whose addresses are the same in every step, so that
    vLLM can capture them in CUDA graphs. Padding rows of a graph have length 0 and negative slots.
    """

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = (vllm_config.compilation_config.static_forward_context[name] for name in layer_names)
        self._layers: list[CachedLayer] = sorted(layers, key=lambda layer: layer.index)
        graphs = vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
        self._bound = vllm_config.model_config.max_model_len if graphs else None
        self._fused = device.type != "cpu"

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Attention:
        """Return the attention of a batch. vLLM calls this once per step; only `common_attn_metadata` is used."""
        batch = common_attn_metadata
        caches = [layer.pages for layer in self._layers]
        if self._fused and batch.max_query_len == 1:
            return self._decode(batch, caches)
        counts = batch.query_start_loc_cpu.diff()  # (S,), number of new tokens
        lengths = batch.seq_lens_cpu_upper_bound  # (S,), number of all tokens
        assert lengths is not None, "vLLM sets the lengths of its sequences"
        if not self._fused:
            return paged(_spans(batch, counts, lengths), self.device, caches, fused=False)
        return PagedAttention.of_tables(
            counts.numpy(), (lengths - counts).numpy(), batch.block_table_tensor, caches, batch.slot_mapping
        )

    def _decode(self, batch: CommonAttentionMetadata, caches: Caches) -> Attention:
        assert batch.positions is not None and batch.num_reqs == batch.num_actual_tokens
        # A graph is replayed for all lengths, and its warm-up must launch the same kernels as its capture.
        longest = batch.max_seq_len if self._bound is None else self._bound
        return DecodeAttention(
            batch.positions, batch.slot_mapping, batch.block_table_tensor, batch.seq_lens, longest, caches
        )


def _spans(batch: CommonAttentionMetadata, counts: Tensor, lengths: Tensor) -> list[Span]:
    """Return the span of each sequence. counts, lengths: number of new and of all tokens, (S,) each."""
    rows = batch.query_start_loc_cpu.tolist()
    spans = []
    for row, count, length, table in zip(
        rows, counts.tolist(), lengths.tolist(), batch.block_table_tensor, strict=False
    ):
        pages = table[: -(-length // PAGE)].tolist()
        spans.append(Span(row, count, length - count, pages))
    return spans
