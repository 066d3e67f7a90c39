"""The policy's decoder as a vLLM model: vLLM schedules, manages KV blocks and captures CUDA graphs; qarl computes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from qarl_formats.compressed import parse_quantization_config
from qarl_formats.weight import UNQUANTIZED
from qarl_kernels.attention import PAGE
from qarl_kernels.logprob import Distribution, Truncation, distribution
from torch import Tensor, nn
from transformers import AutoConfig
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context

from qarl.policy.attention import Attention, paged
from qarl.policy.fused_attention import DecodeAttention
from qarl.policy.pages import Caches, Span
from qarl.policy.routes import NO_ROUTES, recording
from qarl.rollout.published_weights import PublishedWeights
from qarl.rollout.vllm.exact.attention import CachedLayer, pages_of
from qarl.rollout.vllm.recording import RoutingBuffer
from qarl.rollout.vllm.settings import KV_FP8


class ExactModel(nn.Module):
    """The policy's forward on published tensors, which it stores.

    Attributes:
        decoder: The policy's decoder.
        before_batch: Called with the token ids (T,) of each vLLM batch.
        truncation: Temperature, top-k, top-p and min-p of the next tokens.
        weights: The tensors that the decoder reads.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self._config: Any = vllm_config.model_config
        device: Any = vllm_config.device_config.device
        self._device = torch.device(device)
        self._max_rows = vllm_config.scheduler_config.max_num_batched_tokens
        self.before_batch: Callable[[Tensor], None] | None = None
        self._sampled_from: Distribution | None = None  # of the last `compute_logits`
        self._hidden = torch.empty(0)  # its hidden states
        self.truncation = Truncation()
        with _plain_defaults():
            additional: Any = vllm_config.additional_config
            self._build(bool(additional.get(KV_FP8)))
        layers = self.decoder.layers
        self.layers = [CachedLayer(at, one.kv_heads, one.head_dim, self._cache_dtype) for at, one in enumerate(layers)]
        for layer in self.layers:
            name = f"model.layers.{layer.index}.self_attn.attn"
            vllm_config.compilation_config.static_forward_context[name] = layer

    def _build(self, kv_fp8: bool) -> None:
        checkpoint, dtype = Path(self._config.model), self._config.dtype
        shape = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
        stored = json.loads((checkpoint / "config.json").read_text()).get("quantization_config")
        scheme, ignore = (UNQUANTIZED, []) if stored is None else parse_quantization_config(stored)
        context = self._config.max_model_len
        self.weights = PublishedWeights(shape, scheme, ignore, context, dtype, self._device, kv_fp8)
        self.decoder = self.weights.decoder
        for at, table in enumerate(self.decoder.rotary[dtype]):
            self.register_buffer(f"rotary_{at}", table, persistent=False)  # vLLM's sleep of level 2 keeps only buffers
        on_gpu = self._device.type == "cuda"
        self._cache_dtype = torch.float8_e4m3fn if on_gpu and kv_fp8 else dtype

    # --- called by vLLM ------------------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.weights.load(dict(weights))
        self._weight_set = self.weights.weight_set()

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        raise NotImplementedError("prompts are token ids")  # vLLM only requires that the method exists

    def forward(
        self, input_ids: Tensor, positions: Tensor, intermediate_tensors: Any = None, inputs_embeds: Any = None
    ) -> Tensor:
        """Return the final hidden states (T, H) of vLLM's batch. input_ids: (T,) integers; positions: (T,) int64."""
        assert intermediate_tensors is None and inputs_embeds is None, "no pipeline, no embeddings"
        batch: Any = get_forward_context().attn_metadata  # by layer; all layers have the same
        attention = self._profiling_attention(positions) if batch is None else next(iter(batch.values()))
        if self.before_batch is not None:
            self.before_batch(input_ids)
        if self.routing is None:
            return self.decoder(input_ids.long(), attention, self._weight_set)
        routes = recording()
        hidden = self.decoder(input_ids.long(), attention, self._weight_set, routes=routes)
        self.routing(routes.recorded())
        return hidden

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return logits (R, V) float32 of hidden states (R, H), after temperature and truncation."""
        self._hidden = hidden_states
        self._sampled_from = self._distribution(hidden_states, self.truncation)
        return self._sampled_from.logits

    # --- called by qarl ------------------------------------------------------------------------------------------

    @cached_property
    def routing(self) -> RoutingBuffer | None:
        """The experts of the last forward's rows; None for a dense model."""
        found = [layer.experts for layer in self.decoder.layers if layer.experts is not None]
        return RoutingBuffer(self._max_rows, len(found), found[0].per_token, device=self._device) if found else None

    @property
    def experts(self) -> int:
        """Number of experts per layer of a mixture."""
        return next(layer.experts.count for layer in self.decoder.layers if layer.experts is not None)

    def pop_distribution(self, logits: Tensor) -> Distribution:
        """Return the distribution of the logits that the last `compute_logits` returned, and forget it."""
        found, self._sampled_from = self._sampled_from, None
        assert found is not None and found.logits is logits, "vLLM samples from the logits that were computed last"
        return found

    def pop_untruncated_distribution(self, logits: Tensor) -> Distribution:
        """As `pop_distribution`, but at temperature 1 and without truncation, to score prompts."""
        found = self.pop_distribution(logits)
        return found if self.truncation == Truncation() else self._distribution(self._hidden, Truncation())

    def _distribution(self, hidden_states: Tensor, truncation: Truncation) -> Distribution:
        return distribution(hidden_states.contiguous(), self._weight_set.head, truncation)

    @property
    def fused(self) -> bool:
        """Whether the layers run as Triton kernels."""
        return self._weight_set.fused

    def run(self, ids: Tensor, attention: Attention) -> Tensor:
        """Run the decoder on a batch that is not from vLLM. Returns hidden states (T, H). ids: (T,) int64."""
        routes = NO_ROUTES if self.routing is None else recording()
        return self.decoder(ids, attention, self._weight_set, routes=routes)

    def pages(self) -> Caches:
        """Return a KV cache of one zero page per layer, with the strides of vLLM's cache."""
        shapes = [(1, layer.kv_heads, PAGE, 2 * layer.head_dim) for layer in self.layers]
        made = (torch.zeros(shape, dtype=self._cache_dtype, device=self._device) for shape in shapes)
        return [pages_of(cache) for cache in made]

    def _profiling_attention(self, positions: Tensor) -> Attention:
        """Return attention for vLLM's memory profiling, which has no KV cache: each row is its own sequence."""
        rows, device, pages = len(positions), positions.device, self.pages()
        if not self.fused:
            return paged([Span(row, 1, 0, [0]) for row in range(rows)], device, pages, fused=False)
        nothing, table = positions.new_zeros(rows), torch.zeros(rows, 1, dtype=torch.int32, device=device)
        return DecodeAttention(nothing, nothing - 1, table, torch.ones_like(table)[:, 0], 1, pages)


@contextmanager
def _plain_defaults() -> Iterator[None]:
    """Context manager: torch's default device is cpu and dtype float32. vLLM changes them while it creates a model."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)
