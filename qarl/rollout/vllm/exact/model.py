"""The policy's decoder as a model of vLLM: vLLM schedules, holds KV pages and captures CUDA graphs; qarl computes."""

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

from qarl.policy.attention import Attention, Caches, Span, paged
from qarl.policy.decoder import Decoder
from qarl.policy.routes import NO_ROUTES, recording
from qarl.policy.skeleton import schemes_of, skeleton
from qarl.rollout.published_weights import PublishedWeights
from qarl.rollout.vllm.exact.attention import CachedLayer, pages_of
from qarl.rollout.vllm.recording import RoutingBuffer
from qarl.rollout.vllm.settings import KV_FP8


class ExactModel(nn.Module):
    """The policy's forward on published tensors that it holds itself.

    Attributes:
        decoder: The policy's.
        before_batch: Called with the token ids (T,) of each vLLM batch.
        truncation: Shapes the distribution that the next tokens are sampled from.
        routing: For a mixture, the experts of the rows of the last forward.
        weights: What the decoder reads.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self._config = vllm_config.model_config
        self._device: torch.device = vllm_config.device_config.device
        self._rows = vllm_config.scheduler_config.max_num_batched_tokens
        self.before_batch: Callable[[Tensor], None] | None = None
        self._sampled_from: Distribution | None = None
        self._hidden = torch.empty(0)  # states that it was computed from
        self.truncation = Truncation()
        with _plain_defaults():
            self._build(bool(vllm_config.additional_config.get(KV_FP8)))
        layers = self.decoder.layers
        self.layers = [CachedLayer(at, one.kv_heads, one.head_dim, self._cache_dtype) for at, one in enumerate(layers)]
        for layer in self.layers:
            name = f"model.layers.{layer.index}.self_attn.attn"
            vllm_config.compilation_config.static_forward_context[name] = layer

    def _build(self, kv_fp8: bool) -> None:
        place, dtype = Path(self._config.model), self._config.dtype
        shape = AutoConfig.from_pretrained(place, trust_remote_code=False)
        stored = json.loads((place / "config.json").read_text()).get("quantization_config")
        scheme, ignore = (UNQUANTIZED, []) if stored is None else parse_quantization_config(stored)
        model = skeleton(shape)
        scheme_of = schemes_of(model, scheme, ignore)
        positions = -(-self._config.max_model_len // PAGE) * PAGE
        self.decoder = Decoder(model.base_model, positions, {dtype}, self._device)
        for at, table in enumerate(self.decoder.rotary[dtype]):
            self.register_buffer(f"rotary_{at}", table, persistent=False)  # a deep sleep of vLLM's spares buffers alone
        tied = bool(shape.tie_word_embeddings)
        self.weights = PublishedWeights(self.decoder, scheme_of, dtype, self._device, tied, kv_fp8)
        on_gpu = self._device.type == "cuda"
        self._cache_dtype = torch.float8_e4m3fn if on_gpu and kv_fp8 else dtype

    # --- what vLLM asks of a model -------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.weights.load(dict(weights))
        self._read = self.weights.weight_set()

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        raise NotImplementedError("prompts are token ids")  # vLLM looks for the method

    def forward(
        self, input_ids: Tensor, positions: Tensor, intermediate_tensors: Any = None, inputs_embeds: Any = None
    ) -> Tensor:
        """Final hidden states (T, H) of vLLM's current batch. input_ids: (T,) integers; positions: (T,) int64."""
        assert intermediate_tensors is None and inputs_embeds is None, "the sampler is one process, fed with token ids"
        batch = get_forward_context().attn_metadata
        attention = self._measured(positions) if batch is None else next(iter(batch.values()))  # one for all layers
        if self.before_batch is not None:
            self.before_batch(input_ids)
        if self.routing is None:
            return self.decoder(input_ids.long(), attention, self._read)
        routes = recording()
        hidden = self.decoder(input_ids.long(), attention, self._read, routes=routes)
        self.routing(routes.recorded())
        return hidden

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """float32 (R, V) of states (R, H), as tokens are sampled from them."""
        self._hidden = hidden_states
        self._sampled_from = self._distribution(hidden_states, self.truncation)
        return self._sampled_from.logits

    # --- for the sampler and the start ---------------------------------------------------------------------------

    @cached_property
    def routing(self) -> RoutingBuffer | None:
        found = [layer.experts for layer in self.decoder.layers if layer.experts is not None]
        return RoutingBuffer(self._rows, len(found), found[0].per_token, device=self._device) if found else None

    @property
    def experts(self) -> int:
        """Number of experts per layer of a mixture."""
        return next(layer.experts.count for layer in self.decoder.layers if layer.experts is not None)

    def pop_distribution(self, logits: Tensor) -> Distribution:
        """The distribution that `compute_logits` returned these logits of; it was the last one."""
        found, self._sampled_from = self._sampled_from, None
        assert found is not None and found.logits is logits, "vLLM samples from what was computed last"
        return found

    def pop_untruncated_distribution(self, logits: Tensor) -> Distribution:
        """As `pop_distribution`, at temperature 1 and without truncation, as prompts are scored."""
        found = self.pop_distribution(logits)
        return found if self.truncation == Truncation() else self._distribution(self._hidden, Truncation())

    def _distribution(self, hidden_states: Tensor, truncation: Truncation) -> Distribution:
        return distribution(hidden_states.contiguous(), self._read.head, truncation)

    @property
    def fused(self) -> bool:
        """Whether the layers are Triton kernels."""
        return self._read.fused

    def run(self, ids: Tensor, attention: Attention) -> Tensor:
        """Run `forward` on a batch that does not come from vLLM."""
        routes = NO_ROUTES if self.routing is None else recording()
        return self.decoder(ids, attention, self._read, routes=routes)

    def pages(self) -> Caches:
        """A KV cache of one zero page per layer, with the strides of vLLM's."""
        shapes = [(1, layer.kv_heads, PAGE, 2 * layer.head_dim) for layer in self.layers]
        made = (torch.zeros(shape, dtype=self._cache_dtype, device=self._device) for shape in shapes)
        return [pages_of(cache) for cache in made]

    def _measured(self, positions: Tensor) -> Attention:
        """Attention of a batch that only measures memory, before there is a KV cache: each row by itself."""
        rows, device, pages = len(positions), positions.device, self.pages()
        if not self.fused:
            return paged([Span(row, 1, 0, [0]) for row in range(rows)], device, pages, fused=False)
        from qarl.policy.fused_attention import DecodeAttention  # imports Triton, which the CPU does not need

        nothing, table = positions.new_zeros(rows), torch.zeros(rows, 1, dtype=torch.int32, device=device)
        return DecodeAttention(nothing, nothing - 1, table, torch.ones_like(table)[:, 0], 1, pages)


@contextmanager
def _plain_defaults() -> Iterator[None]:
    """Inside, torch has its usual default device and dtype; vLLM creates models under its own."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)
