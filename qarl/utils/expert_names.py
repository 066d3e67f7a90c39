"""Names of the parts of a mixture of experts in checkpoints, by family. Imports no torch."""

from __future__ import annotations

import re
from typing import NamedTuple


class ExpertNames(NamedTuple):
    """Names inside a decoder layer."""

    block: str  # module that holds router and experts
    gate: str  # Linears of an expert
    up: str
    down: str
    shared: str | None = None  # submodule of the block: the shared expert, with the same Linears; None: no such expert

    def router(self) -> str:
        return f"{self.block}.gate"

    def gates(self) -> tuple[str, ...]:
        """Return the modules that no scheme quantizes: the router and the shared expert's gate."""
        return (self.router(),) if self.shared is None else (self.router(), f"{self.block}.{self.shared}_gate")

    def unquantized(self) -> list[str]:
        """Return `gates` as entries of a checkpoint's `ignore`, for programs in which these modules are Linears."""
        return [f"re:.*{name}$" for name in self.gates()]

    def expert(self, index: int, linear: str) -> str:
        """Return the name of one Linear of an expert."""
        return f"{self.block}.experts.{index}.{linear}"

    def shared_stacks(self) -> tuple[tuple[str, ...], ...]:
        """Return the shared expert's packed linears: (gate, up) and (down,). Empty without a shared expert."""
        if self.shared is None:
            return ()
        block = f"{self.block}.{self.shared}"
        return (f"{block}.{self.gate}", f"{block}.{self.up}"), (f"{block}.{self.down}",)


_PLAIN = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
EXPERT_NAMES = {
    "qwen2_moe": _PLAIN._replace(shared="shared_expert"),
    "qwen3_moe": _PLAIN,
    "olmoe": _PLAIN,
    "mixtral": ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
}
"""Names on disk by model type. vLLM uses the same."""

_EXPERT = re.compile(r"(.*\.experts)\.\d+")


def experts_of(block: str) -> str | None:
    """Return `model.layers.0.mlp.experts` for the expert `model.layers.0.mlp.experts.3`; None for other modules."""
    found = _EXPERT.fullmatch(block)
    return None if found is None else found.group(1)


def of_experts(linear: str) -> str | None:
    """Return `mlp.experts.up_proj` for an expert's Linear `mlp.experts.3.up_proj`; None for other modules."""
    block, _, leaf = linear.rpartition(".")
    experts = experts_of(block)
    return None if experts is None else f"{experts}.{leaf}"


def is_router(name: str) -> bool:
    """Whether a parameter is the weight of a router (`model.layers.0.mlp.gate.weight`) or of a shared expert's gate."""
    return name.endswith(tuple(f".{gate}.weight" for names in EXPERT_NAMES.values() for gate in names.gates()))


def expert_stacks(experts: str, count: int) -> dict[str, tuple[str, ...]]:
    """Return the packed linears of a layer's experts: name of the packed weight -> its modules, in order.

    Args:
        experts: Module that holds all experts of a layer (`model.layers.0.mlp.experts`).
        count: Number of experts.

    Returns:
        `<experts>.w13` (vLLM's name): gate and up of the first expert, of the second, and so on. `<experts>.w2`: down
        of each expert.
    """
    names, numbers = next(n for n in EXPERT_NAMES.values() if f".{n.block}." in f"{experts}."), range(count)
    return {
        f"{experts}.w13": tuple(f"{experts}.{i}.{leaf}" for i in numbers for leaf in (names.gate, names.up)),
        f"{experts}.w2": tuple(f"{experts}.{i}.{names.down}" for i in numbers),
    }
