"""Crossings: which published values an update changed. A master that stays on its side of a rounding boundary
publishes the same value, so the sampler does not see that it moved (TRL study, section 6.4)."""

from __future__ import annotations

import torch
from qarl_formats.quantize import codes_changed
from torch import Tensor

from qarl.experts import of_experts
from qarl.weight_sync.snapshot import Snapshot

Crossings = dict[str, tuple[int, int]]
"""Module name -> (changed values, values), in layer order."""


def crossings(before: Snapshot, after: Snapshot) -> Crossings:
    """Changed values of each linear between two snapshots of one policy.

    In a quantized scheme the low-bit codes of its quantized linears, scales aside. Unquantized, the values of the
    layers' published weight matrices, in their 16 bits, embeddings and output layer aside.
    """
    if after.weights:
        found = {name: codes_changed(before.weights[name], weight) for name, weight in after.weights.items()}
    else:
        found = {
            name.removesuffix(".weight"): ((before.tensors[name] != tensor).count_nonzero(), tensor.numel())
            for name, tensor in after.tensors.items()
            if _is_linear(name, tensor)
        }
    if not found:
        return {}
    counts = torch.stack([changed for changed, _ in found.values()]).tolist()  # one transfer from the device
    return {name: (changed, total) for (name, (_, total)), changed in zip(found.items(), counts, strict=True)}


def crossing_metrics(crossed: Crossings) -> dict[str, float]:
    """quant/codes_changed_frac and quant/codes_changed_count over all modules; nothing without modules."""
    total = sum(values for _, values in crossed.values())
    if not total:
        return {}
    changed = sum(count for count, _ in crossed.values())
    return {"quant/codes_changed_frac": changed / total, "quant/codes_changed_count": float(changed)}


def by_layer(crossed: Crossings) -> Crossings:
    """The same with what the experts of a layer changed added up, of each projection."""
    found: Crossings = {}
    for name, (changed, total) in crossed.items():
        together = of_experts(name) or name
        before = found.get(together, (0, 0))
        found[together] = (before[0] + changed, before[1] + total)
    return found


def _is_linear(name: str, tensor: Tensor) -> bool:
    return name.endswith(".weight") and ".layers." in name and tensor.dim() == 2
