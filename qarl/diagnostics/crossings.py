"""Code flips: count the published values that an update changed.

A master that does not cross a rounding boundary publishes the same value, so the sampler does not see its change (TRL
study, section 6.4).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from qarl_formats.weight import LowBitWeight, codes_changed
from torch import Tensor

from qarl.utils.expert_names import of_experts
from qarl.weight_sync.snapshot import Snapshot

Crossings = dict[str, tuple[int, int]]
"""Module name -> (changed values, values), in layer order."""


def crossings(before: Snapshot, after: Snapshot) -> Crossings:
    """Count changed values per linear between two snapshots of the same policy.

    With a quantized scheme these are the codes of the quantized linears, without scales. Otherwise they are the 16-bit
    values of the layers' weight matrices, without embeddings and output layer.
    """
    shapes = _linears(after)
    if not shapes:
        return {}
    names: list[str] = []
    counts: list[Tensor] = []
    for modules, weight_before, weight_after in _compared(before, after, shapes):
        names += modules
        counts.append(codes_changed(weight_before, weight_after, [shapes[name][0] for name in modules]))
    changed = dict(zip(names, torch.cat(counts).tolist(), strict=True))  # one transfer from the device
    return {name: (changed[name], rows * columns) for name, (rows, columns) in shapes.items()}


def crossing_metrics(crossed: Crossings) -> dict[str, float]:
    """Compute quant/codes_changed_frac and quant/codes_changed_count over all modules; empty without modules."""
    total = sum(values for _, values in crossed.values())
    if not total:
        return {}
    changed = sum(count for count, _ in crossed.values())
    return {"quant/codes_changed_frac": changed / total, "quant/codes_changed_count": float(changed)}


@torch.no_grad()
def predicted_steps(snapshot: Snapshot, lr: float) -> dict[str, float]:
    """Predict how long a weight keeps its published value (TRL study, section 2.3).

    quant/crossing_steps is half the distance to the next published value divided by the learning rate, averaged over
    nonzero values. Adam changes a master by about the learning rate per step. For bf16 the result is about
    |W| / (256 lr). Omitted for schemes with a zero point and for learning rate 0.
    """
    total, count = 0.0, 0
    for name in _linears(snapshot) if lr > 0 else ():
        weight = snapshot.weight(name)
        if not weight.scheme.symmetric:
            return {}
        values = weight.dequantize(torch.float32)
        codes = weight.codes() if weight.quantized else weight.tensors["weight"]
        there = (codes.float() != 0) & (values != 0)
        scale = values[there] / codes.float()[there]
        total += float((scale * _spacing(codes[there], weight.scheme.weight_bits)).double().sum())
        count += int(there.sum())
    return {"quant/crossing_steps": total / count / (2.0 * lr)} if count else {}


def _spacing(codes: Tensor, bits: int | None) -> Tensor:
    """Distance from each code to the next larger magnitude: 1 for integers, one ulp for floats."""
    if not codes.dtype.is_floating_point:
        return torch.ones_like(codes, dtype=torch.float32)
    info = torch.finfo(codes.dtype)
    digits, least = round(-math.log2(info.eps)), info.smallest_normal
    if bits == 4:  # e2m1, stored in a wider dtype
        digits, least = 1, 1.0
    exponent = codes.float().abs().clamp(min=least).log2().floor()
    return torch.exp2(exponent - digits)


@torch.no_grad()
def sign_agreement(before: Snapshot, after: Snapshot, signs: Mapping[str, Tensor]) -> dict[str, float]:
    """Measure how often a changed value moved against the clean gradient (TRL study, A.4: not predictive there).

    Args:
        before: Published weights before the step.
        after: Published weights after the step.
        signs: Sign of the clean loss gradient by master name, int8 in the master's shape.

    Returns:
        quant/sign_agreement: fraction of changed values whose change has the sign of the negative gradient. Empty if
        no value changed.
    """
    agree = changed = 0
    for name in _linears(after):
        if (sign := signs.get(f"{name}.weight")) is None:
            continue
        old, new = before.weight(name), after.weight(name)
        moved = new.dequantize(torch.float32) - old.dequantize(torch.float32)
        if new.quantized:  # a changed scale changes the values of a whole group
            moved = moved.masked_fill(new.codes().float() == old.codes().float(), 0.0)
        sign = sign.to(moved.device)
        agree += int(((moved != 0) & (moved.sign() == -sign)).sum())
        changed += int((moved != 0).sum())
    return {"quant/sign_agreement": agree / changed} if changed else {}


def by_layer(crossed: Crossings) -> Crossings:
    """Sum the counts over the experts of each layer, per projection."""
    found: Crossings = {}
    for name, (changed, total) in crossed.items():
        together = of_experts(name) or name
        before = found.get(together, (0, 0))
        found[together] = (before[0] + changed, before[1] + total)
    return found


def _linears(snapshot: Snapshot) -> dict[str, tuple[int, ...]]:
    """Shapes (N, K) of the counted linears by module name."""
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
    """Yield (module names, weight before, weight after). Packed linears stay whole if both snapshots have them."""
    left = dict.fromkeys(names)
    for together, whole in after.groups.items():
        if together in before.groups and all(name in left for name in together):
            yield together, before.groups[together], whole
            for name in together:
                del left[name]
    for name in left:
        yield (name,), before.weight(name), after.weight(name)
