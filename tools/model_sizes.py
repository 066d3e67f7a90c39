"""The models that benchmarks run, by name. Imports nothing before one is built, so that ranks start at once."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from qarl.config.architecture import Architecture


@dataclass(frozen=True)
class Shape:
    """A model. inner: features of an MLP, or of one expert. tied: whether the output layer is the embedding.
    experts: of a layer, of which a token goes through `per_token`; 0: there is an MLP. group_size: of int4 weights,
    where nothing says another. family: its `model_type`."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    vocabulary: int = 151_936
    experts: int = 0
    per_token: int = 0
    group_size: int = 128
    family: str = "qwen3"

    def config(self) -> PreTrainedConfig:
        from transformers import AutoConfig

        mixture: dict[str, Any] = {}
        if self.experts:
            mixture = {"num_local_experts": self.experts, "num_experts_per_tok": self.per_token}
        if self.family == "qwen3_moe":
            mixture |= {"moe_intermediate_size": self.inner, "norm_topk_prob": True, "mlp_only_layers": []}
        return AutoConfig.for_model(
            self.family,
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=40_960,
            tie_word_embeddings=self.tied,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
            **mixture,
        )

    def architecture(self) -> Architecture:
        from qarl.config.architecture import read_config_json

        with tempfile.TemporaryDirectory() as place:
            self.config().save_pretrained(place)
            return read_config_json(Path(place) / "config.json")


DENSE = {  # of Qwen3, by size
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 8, 128, True),
    "qwen3-1.7b": Shape(2048, 6144, 28, 16, 8, 128, True),
    "qwen3-4b": Shape(2560, 9728, 36, 32, 8, 128, True),
    "qwen3-8b": Shape(4096, 12_288, 36, 32, 8, 128, False),
    "qwen3-14b": Shape(5120, 17_408, 40, 40, 8, 128, False),
    "qwen3-32b": Shape(5120, 25_600, 64, 64, 8, 128, False),
}
SHAPES = {
    "tiny": Shape(64, 128, 2, 4, 2, 32, True, 512, group_size=32),
    "tiny-moe": Shape(64, 64, 2, 4, 2, 32, False, 512, 4, 2, 32, "qwen3_moe"),
    "smollm2": Shape(576, 1536, 30, 9, 3, 64, True, 49_152, group_size=64, family="llama"),
    "qwen2.5-1.5b": Shape(1536, 8960, 28, 12, 2, 128, True, family="qwen2"),
    "qwen2.5-7b": Shape(3584, 18_944, 28, 28, 4, 128, False, family="qwen2"),
    **DENSE,
    "qwen3-30b-a3b": Shape(2048, 768, 48, 32, 4, 128, False, experts=128, per_token=8, family="qwen3_moe"),
}
