"""What is measured: linear layers of known models, numbers of rows."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

SCHEMES = ("w4a16", "w8a8", "fp8", "w4a8", "fp8_block", "dense")
SECTIONS = (*SCHEMES, "experts")
ROWS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096, 16384)
FEW_ROWS = 64  # decode: the summary keeps products with at most this many rows apart

# name -> layer -> (N, K) = (out_features, in_features); q, k, v and gate, up are one weight each, as in vLLM
MODELS: dict[str, dict[str, tuple[int, int]]] = {
    "qwen3-0.6b": {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)},
    "qwen3-8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)},
    "qwen3-30b-a3b": {"qkv": (5120, 2048), "o": (2048, 4096)},
    "llama3-70b": {"qkv": (10240, 8192), "o": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672)},
}
# The others that tiles are tuned for.
TUNED = MODELS | {
    "qwen3-1.7b": {"qkv": (4096, 2048), "o": (2048, 2048), "gate_up": (12288, 2048), "down": (2048, 6144)},
    "qwen3-4b": {"qkv": (6144, 2560), "o": (2560, 4096), "gate_up": (19456, 2560), "down": (2560, 9728)},
}


@dataclass(frozen=True)
class Layer:
    """One linear layer: its model, its name there, (N, K)."""

    model: str
    name: str
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.model} {self.name} {self.n}x{self.k}"


def layers(models: Iterable[str]) -> Iterator[Layer]:
    """The linear layers of these models, each shape once."""
    seen: set[tuple[int, int]] = set()
    for model in models:
        for name, (n, k) in TUNED[model].items():
            if (n, k) not in seen:
                seen.add((n, k))
                yield Layer(model, name, n, k)
