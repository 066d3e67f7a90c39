"""What the learner and its peer both run: a Hugging Face configuration of a shape, and the tokens of a micro-batch."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3Config, Qwen3MoeConfig

from ranks_bench.shapes import Shape

LENGTH = 1024  # of a sequence


def model_config(shape: Shape) -> Qwen3Config | Qwen3MoeConfig:
    sizes: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": shape.tied,
        "pad_token_id": 2,
    }
    if not shape.experts:
        return Qwen3Config(**sizes)
    experts = {"num_experts": shape.experts, "num_experts_per_tok": shape.per_token, "norm_topk_prob": True}
    return Qwen3MoeConfig(**sizes, moe_intermediate_size=shape.inner, **experts)


def random_tokens(shape: Shape, tokens: int, rank: int) -> torch.Tensor:
    """Token ids (sequences, length + 1), int64: `length` of each are run, and `length` predicted. Each rank's own."""
    length = min(LENGTH, tokens)
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(3, shape.vocabulary, (tokens // length, length + 1), generator=generator)
