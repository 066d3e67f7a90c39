"""The first place where two traced forwards diverge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from qarl.policy.trace import Step, Tracer

OPERATIONS = {
    "embedding": "the embedding",
    "stream": "the residual stream that it reads",
    "input_norm": "the norm before attention",
    "qkv": "the product of q, k and v",
    "rotary": "norms and rotation of q and k; the keys that attention reads",
    "attention": "attention over the keys so far",
    "o": "the product of o",
    "mlp_stream": "the residual stream before the MLP",
    "mlp_norm": "the norm before the MLP",
    "router": "the router's logits and the experts that they choose",
    "gate_up": "the product of gate and up",
    "activation": "silu(gate) * up",
    "shared_gate": "the gate of the shared expert",
    "shared_gate_up": "the product of gate and up of the shared expert",
    "shared_activation": "silu(gate) * up of the shared expert",
    "shared_down": "the product of down of the shared expert",
    "down": "the product of down; for experts, the weighted sum of their outputs",
    "final_stream": "the residual stream after the last layer",
    "final_norm": "the last norm",
    "head": "the output layer and the log-prob",
}


@dataclass(frozen=True)
class FirstDifference:
    """The first place where two forwards diverge. position: token position. layer: None outside the layers."""

    position: int
    layer: int | None
    operation: str

    def step(self, layers: int) -> Step:
        """Return the key of `Tracer.found`. layers: number of layers of the model."""
        outside = -1 if self.operation == "embedding" else layers
        return outside if self.layer is None else self.layer, self.operation

    def __str__(self) -> str:
        at = "" if self.layer is None else f"layer {self.layer}, "
        return f"{at}{self.operation} ({OPERATIONS[self.operation]}), at position {self.position}"


def first_difference(
    one: Mapping[Step, Mapping[int, set[int]]], other: Mapping[Step, Mapping[int, set[int]]]
) -> FirstDifference | None:
    """Return the first place with different digests: the earliest position, then the first operation; None if equal.

    A row depends only on earlier positions, so no other difference caused this one. one, other: `Tracer.found` of both;
    `one` determines the order of operations.
    """
    both = {step: places for step, places in one.items() if step in other}
    layers = 1 + max((layer for layer, operation in one if not operation.startswith("final")), default=-1)
    for position in sorted({position for places in both.values() for position in places}):
        for step, places in both.items():
            seen = places.get(position, set()), other[step].get(position, set())
            if all(seen) and len(seen[0] | seen[1]) > 1:
                layer, operation = step
                return FirstDifference(position, layer if 0 <= layer < layers else None, operation)
    return None


def value_differences(one: Tracer, other: Tracer) -> tuple[int, int, float]:
    """Compare the watched values of two tracers in their first forward that differs.

    Returns:
        The number of values, how many of them differ, and the largest difference.
    """
    for a in one.values:
        for b in other.values:
            if not torch.equal(a, b):
                gap = (a - b).abs().nan_to_num(float("inf"))
                return len(a), int((gap != 0).sum()), float(gap.max())
    return max((len(a) for a in one.values), default=0), 0, 0.0
