"""Code flips: which published values an update changed. A master that stays on its side of a rounding boundary
publishes the same value, so the sampler does not see that it moved (TRL study, section 6.4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from qarl_formats.weight import LowBitWeight, codes_changed
from torch import Tensor

from qarl.utils.expert_names import of_experts
from qarl.weight_sync.snapshot import Snapshot

Crossings = dict[str, tuple[int, int]]
"""Module name -> (changed values, values), in layer order."""


def crossings(before: Snapshot, after: Snapshot) -> Crossings:
    """Changed values per linear between two snapshots of one policy.

    With a quantized scheme these are the codes of the quantized linears, without scales. Otherwise they are the 16-bit
    values of the layers' weight matrices, without embeddings and output layer.
    """
    shapes = _linears(after)
    if not shapes:
        return {}
    names: list[str] = []
    counts: list[Tensor] = []
    for together, its_before, its_after in _compared(before, after, shapes):
        names += together
        counts.append(codes_changed(its_before, its_after, [shapes[name][0] for name in together]))
    changed = dict(zip(names, torch.cat(counts).tolist(), strict=True))  # one transfer from the device
    return {name: (changed[name], rows * columns) for name, (rows, columns) in shapes.items()}


def crossing_metrics(crossed: Crossings) -> dict[str, float]:
    """quant/codes_changed_frac and quant/codes_changed_count over all modules; empty without modules."""
    total = sum(values for _, values in crossed.values())
    if not total:
        return {}
    changed = sum(count for count, _ in crossed.values())
    return {"quant/codes_changed_frac": changed / total, "quant/codes_changed_count": float(changed)}


def by_layer(crossed: Crossings) -> Crossings:
    """The same, with the experts of a layer added up per projection."""
    found: Crossings = {}
    for name, (changed, total) in crossed.items():
        together = of_experts(name) or name
        before = found.get(together, (0, 0))
        found[together] = (before[0] + changed, before[1] + total)
    return found


def _linears(snapshot: Snapshot) -> dict[str, tuple[int, ...]]:
    """Shapes (N, K) of the linears whose values count, by module name."""
    if snapshot.weights:
        return {name: weight.shape for name, weight in snapshot.weights.items()}
    return {
        name.removesuffix(".weight"): tuple(tensor.shape)
        for name, tensor in snapshot.tensors.items()
        if name.endswith(".weight") and ".layers." in name and tensor.dim() == 2
    }


def _compared(
    before: Snapshot, after: Snapshot, names: dict[str, tuple[int, ...]]
) -> Iterator[tuple[Sequence[str], LowBitWeight, LowBitWeight]]:
    """Modules, each once, and their weights in both snapshots; packed linears at once if both have them."""
    left = dict.fromkeys(names)
    for together, whole in after.groups.items():
        if together in before.groups and all(name in left for name in together):
            yield together, before.groups[together], whole
            for name in together:
                del left[name]
    for name in left:
        yield (name,), before.weight(name), after.weight(name)
