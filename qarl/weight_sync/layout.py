"""What an engine must know of a model to hold it and to size its memory, without the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from qarl_formats.scheme import Scheme
from transformers import GenerationConfig, PreTrainedConfig


@dataclass(frozen=True)
class ModelLayout:
    """Shape, format and place of the model that snapshots are of.

    config: of the unquantized model. generation: its generation config, which names the tokens that end a response;
    None where it has none. scheme, ignore: how its linear layers are stored, and which are not. dtype: of what is not
    quantized, and of activations. device: where snapshots are. max_length: tokens of prompt and response, at most.
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
        """Attention heads that have keys and values of their own."""
        return self.config.num_key_value_heads

    @property
    def head_dim(self) -> int:
        """Features of an attention head."""
        given = getattr(self.config, "head_dim", None)
        return given or self.config.hidden_size // self.config.num_attention_heads
