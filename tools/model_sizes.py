"""Sizes of the models that benchmarks run, by name. Imports nothing, so that ranks start at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """inner: features of an MLP, or of one expert. tied: whether the output layer is the embedding."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool


SIZES = {
    "tiny": Sizes(64, 128, 2, 4, 2, 16, True),
    "smollm2": Sizes(576, 1536, 30, 9, 3, 64, True),
    "qwen3-0.6b": Sizes(1024, 3072, 28, 16, 8, 128, True),
    "qwen3-1.7b": Sizes(2048, 6144, 28, 16, 8, 128, True),
    "qwen3-4b": Sizes(2560, 9728, 36, 32, 8, 128, True),
    "qwen3-8b": Sizes(4096, 12_288, 36, 32, 8, 128, False),
    "qwen3-14b": Sizes(5120, 17_408, 40, 40, 8, 128, False),
    "qwen3-32b": Sizes(5120, 25_600, 64, 64, 8, 128, False),
    "qwen3-30b-a3b": Sizes(2048, 768, 48, 32, 4, 128, False),
}
QWEN3 = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b")  # without experts, by size
