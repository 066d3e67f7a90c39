"""What is measured: linear layers of known models, numbers of rows."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from model_sizes import SHAPES

from qarl.config.architecture import Architecture

SCHEMES = ("w4a16", "w8a8", "fp8", "w4a8", "fp8_block", "dense")
SECTIONS = (*SCHEMES, "experts")
ROWS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096, 16384)
FEW_ROWS = 64  # decode: the summary keeps products with at most this many rows apart
MODELS = ("qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b", "llama3-70b")
MIXTURES = [name for name, shape in SHAPES.items() if shape.experts]


class Layer(NamedTuple):
    """One linear layer: its model, its name there, (N, K) = (out_features, in_features)."""

    model: str
    name: str
    n: int
    k: int


def linears(a: Architecture) -> dict[str, tuple[int, int]]:
    """(N, K) of the linear layers of a model by name; q, k, v and gate, up are one weight each."""
    heads, hidden, mixture = a.num_heads * a.head_dim, a.hidden_size, a.mixture
    found = {"qkv": (heads + 2 * a.num_kv_heads * a.head_dim, hidden), "o": (hidden, heads)}
    if mixture is None or a.dense_layers:
        found |= {"gate_up": (2 * a.intermediate_size, hidden), "down": (hidden, a.intermediate_size)}
    if mixture is not None and mixture.shared:
        found |= {"shared_gate_up": (2 * mixture.shared, hidden), "shared_down": (hidden, mixture.shared)}
    return found


def layers(models: Iterable[str]) -> Iterator[Layer]:
    """The linear layers of these models, each shape once."""
    seen: set[tuple[int, int]] = set()
    for model in models:
        for name, size in linears(SHAPES[model].architecture()).items():
            if size not in seen:
                seen.add(size)
                yield Layer(model, name, *size)
