"""vLLM's models with the policy's forward: vLLM loads and holds the weights, the policy's decoder computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from qarl_kernels.attention import PAGE
from qarl_kernels.logprob import Distribution, Truncation, distribution
from torch import Tensor, nn
from transformers import AutoConfig
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention as VLLMAttention
from vllm.model_executor.models.registry import ModelRegistry

from qarl.policy.attention import Attention, Caches, Span, paged
from qarl.policy.decoder import Decoder
from qarl.policy.routes import NO_ROUTES, recording
from qarl.policy.trace import Context, Tracer
from qarl.policy.view import View
from qarl.rollout.vllm.exact.attention import CachedLayer, pages_of
from qarl.rollout.vllm.exact.view import addresses, bare_decoder, held_view
from qarl.rollout.vllm.head import Float32Head, use_float32_head
from qarl.rollout.vllm.recording import Buffer
from qarl.rollout.vllm.settings import KV_FP8
from qarl.weight_sync.verify import PublishError

PREFIX = "Exact"  # of the registered classes' names


class Forward:
    """The policy's forward on the weights of one vLLM model.

    It is made when it is first needed, after vLLM has loaded. truncation: of the tokens that are drawn next. routing:
    the experts of the rows of the forward that ran last, of a mixture.
    drawn_from: the last distribution that was computed, until somebody takes it.
    """

    def __init__(self, model: nn.Module, vllm_config: VllmConfig, layers: list[CachedLayer]) -> None:
        self._model, self._config, self._layers = model, vllm_config.model_config, layers
        self._device: torch.device = vllm_config.device_config.device
        self._shape = AutoConfig.from_pretrained(self._config.model, trust_remote_code=False)  # later it may be gone
        self.truncation = Truncation()
        self._drawn_from: Distribution | None = None
        self._tell: Callable[[Tensor], None] | None = None
        self._kv_fp8 = kv_fp8(vllm_config)
        self._rows = vllm_config.scheduler_config.max_num_batched_tokens

    @cached_property
    def head(self) -> Float32Head:
        return use_float32_head(self._model)

    @cached_property
    def _decoder(self) -> Decoder:
        rows = -(-self._config.max_model_len // PAGE) * PAGE
        with torch.inference_mode(False), torch.no_grad():
            decoder = bare_decoder(self._shape, rows, self._config.dtype, self._device)
        decoder.role.settle(self._view(decoder))
        return decoder

    def _view(self, decoder: Decoder) -> View:
        return held_view(self._model, decoder, self._config.dtype, self.head.weight, self._kv_fp8)

    @cached_property
    def routing(self) -> Buffer | None:
        found = [layer.experts for layer in self._decoder.layers if layer.experts is not None]
        return Buffer(self._rows, len(found), found[0].per_token, self._device) if found else None

    def follow(self) -> None:
        """Read the weights where they are after a load. Raises PublishError where CUDA graphs read them elsewhere."""
        role = self._decoder.role
        view = self._view(self._decoder)
        if view.fused and list(addresses(view)) != list(addresses(role.view)):
            raise PublishError("publish: vLLM's reload moved a weight, and its CUDA graphs read the old one")
        role.settle(view)

    def states(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Final hidden states (T, H) of vLLM's current batch. ids: (T,) integers; positions: (T,) int64."""
        batch = get_forward_context().attn_metadata
        attention = self._measured(positions) if batch is None else next(iter(batch.values()))  # one for all layers
        if self._tell is not None:
            self._tell(ids)
        if self.routing is None:
            return self._decoder(ids.long(), attention)
        routes = recording()
        hidden = self._decoder(ids.long(), attention, routes=routes)
        self.routing.leave(routes.recorded())
        return hidden

    @contextmanager
    def traced(self, tracer: Tracer, rows: Callable[[Tensor], Iterable[Context]]) -> Iterator[None]:
        """Inside, forwards are told to the tracer. rows: what those of the batch that runs now are, by its ids."""
        self._tell = lambda ids: tracer.expect(rows(ids))
        try:
            with self._decoder.noting(tracer):
                yield
        finally:
            self._tell = None

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 (R, V) of states (R, H), as tokens are drawn from them."""
        self._drawn_from = distribution(hidden.contiguous(), self._decoder.role.view.head, self.truncation)
        return self._drawn_from.logits

    def take(self, logits: Tensor) -> Distribution:
        """The distribution that has these logits, computed last."""
        found, self._drawn_from = self._drawn_from, None
        assert found is not None and found.logits is logits, "vLLM draws from what was computed last"
        return found

    @property
    def fused(self) -> bool:
        """Whether its layers are Triton kernels."""
        return self._decoder.role.view.fused

    def run(self, ids: Tensor, attention: Attention) -> Tensor:
        """`states` of a batch that is not vLLM's."""
        return self._decoder(ids, attention, routes=NO_ROUTES if self.routing is None else recording())

    def pages(self) -> Caches:
        """A KV cache of one page a layer, of zeros, with the strides of vLLM's."""
        shapes = [(1, layer.kv_heads, PAGE, 2 * layer.head_dim) for layer in self._layers]
        dtype = self._decoder.role.view.cache_dtype(self._config.dtype)
        made = (torch.zeros(shape, dtype=dtype, device=self._device) for shape in shapes)
        return [pages_of(cache) for cache in made]

    def _measured(self, positions: Tensor) -> Attention:
        """For a batch of vLLM's that only measures memory, before there is a KV cache: each row for itself."""
        rows, device, pages = len(positions), positions.device, self.pages()
        if not self.fused:
            return paged([Span(row, 1, 0, [0]) for row in range(rows)], device, pages, fused=False)
        from qarl.policy.fused_attention import DecodeAttention  # imports Triton, which the CPU does not need

        nothing, table = positions.new_zeros(rows), torch.zeros(rows, 1, dtype=torch.int32, device=device)
        return DecodeAttention(nothing, nothing - 1, table, torch.ones_like(table)[:, 0], 1, pages)


def kv_fp8(vllm_config: VllmConfig) -> bool:
    """Whether keys and values are e4m3, as `engine_arguments` asked for."""
    return bool(vllm_config.additional_config.get(KV_FP8))


def cache_dtype(vllm_config: VllmConfig) -> torch.dtype:
    """What vLLM's KV cache holds: on a GPU, where layers are Triton kernels, e4m3 where that is asked for."""
    on_gpu = vllm_config.device_config.device.type == "cuda"
    return torch.float8_e4m3fn if on_gpu and kv_fp8(vllm_config) else vllm_config.model_config.dtype


class ExactModel(nn.Module):
    """Put before one of vLLM's causal language models, whose layers it leaves as holders of their weights."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        found = vllm_config.compilation_config.static_forward_context
        layers = []
        for name, module in list(self.named_modules()):
            if isinstance(module, VLLMAttention):
                owner, _, leaf = name.rpartition(".")
                delattr(self.get_submodule(owner), leaf)
                layer = CachedLayer(len(layers), module.num_kv_heads, module.head_size, cache_dtype(vllm_config))
                found[module.layer_name] = layer
                layers.append(layer)
        self.policy = Forward(self, vllm_config, layers)

    def forward(
        self, input_ids: Tensor, positions: Tensor, intermediate_tensors: Any = None, inputs_embeds: Any = None
    ) -> Tensor:
        assert intermediate_tensors is None and inputs_embeds is None, "the sampler is one process, fed with token ids"
        return self.policy.states(input_ids, positions)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.policy.logits(hidden_states)


def register(architecture: str) -> str:
    """Make vLLM's causal language model of this name known with the policy's forward. Returns its new name."""
    name = PREFIX + architecture
    if name not in ModelRegistry.get_supported_archs():
        base = ModelRegistry.models[architecture].load_model_cls()
        ModelRegistry.register_model(name, type(name, (ExactModel, base), {}))
    return name
