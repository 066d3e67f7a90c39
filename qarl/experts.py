"""What the parts of a mixture of experts are called in checkpoints, by family."""

from __future__ import annotations

import re
from typing import NamedTuple


class ExpertNames(NamedTuple):
    """block: the module of a layer that holds router and experts. gate, up, down: an expert's linears. shared: inside
    the block, the expert that all tokens go through, with the same linears; None: there is none."""

    block: str
    gate: str
    up: str
    down: str
    shared: str | None = None

    def router(self) -> str:
        """The router's module, inside the layer."""
        return f"{self.block}.gate"

    def shared_gate(self) -> str | None:
        """The module that says how much of the shared expert a token takes, inside the layer; None: there is none."""
        return None if self.shared is None else f"{self.block}.{self.shared}_gate"

    def gates(self) -> tuple[str, ...]:
        """The modules that no scheme quantizes: the router, and the shared expert's gate."""
        return tuple(name for name in (self.router(), self.shared_gate()) if name is not None)

    def unquantized(self) -> list[str]:
        """The same as a checkpoint's `ignore` has them: many programs have linears there, as elsewhere."""
        return [f"re:.*{name}$" for name in self.gates()]

    def expert(self, index: int, linear: str) -> str:
        """One linear of an expert, inside the layer."""
        return f"{self.block}.experts.{index}.{linear}"

    def shared_stacks(self) -> tuple[tuple[str, ...], ...]:
        """The shared expert's linears inside the layer, those of one input together: gate and up; down. Empty where
        there is none."""
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
"""By model type; the names on disk, which vLLM knows too."""

_EXPERT = re.compile(r"(.*\.experts)\.\d+")


def experts_of(block: str) -> str | None:
    """Of an expert's module (`model.layers.0.mlp.experts.3`) what holds all of the layer's; None: it is no expert."""
    found = _EXPERT.fullmatch(block)
    return None if found is None else found.group(1)


def of_experts(linear: str) -> str | None:
    """Of an expert's linear (`model.layers.0.mlp.experts.3.up_proj`) the name that all experts share
    (`model.layers.0.mlp.experts.up_proj`); None: it is no expert's."""
    block, _, leaf = linear.rpartition(".")
    together = experts_of(block)
    return None if together is None else f"{together}.{leaf}"


def is_router(name: str) -> bool:
    """Whether a parameter is the weight of a router (`model.layers.0.mlp.gate.weight`) or of a shared expert's gate."""
    return name.endswith(tuple(f".{gate}.weight" for names in EXPERT_NAMES.values() for gate in names.gates()))


def names_of(module: str) -> ExpertNames:
    """What the parts are called beside a module inside the mixture (`model.layers.0.mlp.experts`)."""
    return next(names for names in EXPERT_NAMES.values() if f".{names.block}." in f"{module}.")


def expert_stacks(experts: str, count: int) -> dict[str, tuple[str, ...]]:
    """The modules of a layer's experts that are multiplied as one, by the stem that vLLM has for it, in order.

    experts: what holds all of them (`model.layers.0.mlp.experts`). w13: gate and up of the first, of the second, ....
    w2: their down.
    """
    names, numbers = names_of(experts), range(count)
    return {
        "w13": tuple(f"{experts}.{i}.{leaf}" for i in numbers for leaf in (names.gate, names.up)),
        "w2": tuple(f"{experts}.{i}.{names.down}" for i in numbers),
    }
