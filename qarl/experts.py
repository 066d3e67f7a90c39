"""What the parts of a mixture of experts are called in checkpoints, by family."""

from __future__ import annotations

import re
from typing import NamedTuple


class ExpertNames(NamedTuple):
    """block: the module of a layer that holds router and experts. gate, up, down: an expert's linears."""

    block: str
    gate: str
    up: str
    down: str

    def router(self) -> str:
        """The router's module, inside the layer."""
        return f"{self.block}.gate"

    def unquantized(self) -> str:
        """The routers as a checkpoint's `ignore` has them: many programs have linears there, as elsewhere."""
        return f"re:.*{self.router()}$"

    def expert(self, index: int, linear: str) -> str:
        """One linear of an expert, inside the layer."""
        return f"{self.block}.experts.{index}.{linear}"


_PLAIN = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
EXPERT_NAMES = {
    "qwen3_moe": _PLAIN,
    "olmoe": _PLAIN,
    "mixtral": ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
}
"""By model type; the names on disk, which vLLM knows too."""

_EXPERT = re.compile(r"(.*\.experts)\.\d+")


def experts_of(block: str) -> str | None:
    """Of an expert's module (`model.layers.0.mlp.experts.3`) what holds all of the layer's; None: it is no expert."""
    found = _EXPERT.fullmatch(block)
    return None if found is None else found.group(1)


def is_router(name: str) -> bool:
    """Whether a parameter is a router's weight (`model.layers.0.mlp.gate.weight`)."""
    return name.endswith(tuple(f".{names.router()}.weight" for names in EXPERT_NAMES.values()))
