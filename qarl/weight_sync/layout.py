"""The facts of a model that an engine needs to hold it and to size its memory, without the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from qarl_formats.scheme import Scheme
from transformers import GenerationConfig, PreTrainedConfig


@dataclass(frozen=True)
class ModelLayout:
    """Shape, format and device of the model in snapshots.

    config: of the unquantized model. generation: its generation config with the tokens that end a response, if it has
    one. scheme, ignore: of the linear layers, and which are not quantized. dtype: of everything unquantized and of
    activations. device: of snapshots. max_length: most tokens of prompt and response.
    """

    config: PreTrainedConfig
    generation: GenerationConfig | None
    scheme: Scheme
    ignore: list[str]
    dtype: torch.dtype
    device: torch.device
    max_length: int

    @property
    def layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def kv_heads(self) -> int:
        """Attention heads with their own keys and values."""
        return self.config.num_key_value_heads

    @property
    def head_dim(self) -> int:
        """Features per attention head."""
        given = getattr(self.config, "head_dim", None)
        return given or self.config.hidden_size // self.config.num_attention_heads
