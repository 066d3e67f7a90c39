"""What of a new version must travel: everything, what changed, or of what changed only the changed words.

A step of training moves few codes of a quantized weight: most masters stay within their rounding interval. So most
32-bit words of most tensors are those that the sampler holds already. Fingerprints say which tensors changed; for
those, a patch is the places and the new values of the changed words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qarl.publish.verify import Fingerprint

INDICES, VALUES = "#indices", "#values"  # what the two tensors of a patch are called after the tensor's name


@dataclass(frozen=True)
class Patch:
    """The changed 32-bit words of a tensor's bytes in row-major order, the last word zero-padded.

    indices: int32, or int64 where the tensor has 2^31 words or more; ascending. values: int32, as many.
    """

    indices: Tensor
    values: Tensor

    @property
    def nbytes(self) -> int:
        return self.indices.nbytes + self.values.nbytes


def _words(tensor: Tensor) -> Tensor:
    """The int32 words of a contiguous tensor: a view where its size and address allow one, else a padded copy."""
    assert tensor.is_contiguous(), "a patch is of bytes in row-major order"
    data = tensor.detach().reshape(-1).view(torch.uint8)
    if data.numel() % 4 == 0 and data.storage_offset() % 4 == 0:
        return data.view(torch.int32)
    padded = data.new_zeros(-(-data.numel() // 4) * 4)
    padded[: data.numel()] = data
    return padded.view(torch.int32)


def patch_of(old: Tensor, new: Tensor) -> Patch | None:
    """What turns `old` into `new`; None where they are equal bit for bit.

    old, new: of one shape, dtype and device, any dtype. The patch lives on their device.
    """
    assert (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device), (old.shape, new.shape)
    words = _words(new.contiguous())
    places = (_words(old.contiguous()) != words).nonzero()[:, 0]
    if not places.numel():
        return None
    return Patch(places.int() if words.numel() < 2**31 else places, words[places])


def apply_patch(tensor: Tensor, patch: Patch) -> None:
    """Turn the old tensor into the new one, in place. tensor: contiguous, on any device; the patch goes there."""
    words = _words(tensor)
    words[patch.indices.to(words.device, torch.int64)] = patch.values.to(words.device)
    if words.data_ptr() != tensor.data_ptr():
        data = tensor.detach().reshape(-1).view(torch.uint8)
        data.copy_(words.view(torch.uint8)[: data.numel()])


@dataclass(frozen=True)
class Shipment:
    """What travels for one publish, by tensor name in layer order.

    full: whole tensors, the published ones themselves. patches: of tensors that the receiver has the last version of.
    unchanged: what does not travel. full_nbytes: bytes of all tensors, had everything travelled whole.
    """

    full: dict[str, Tensor]
    patches: dict[str, Patch]
    unchanged: tuple[str, ...]
    full_nbytes: int

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return sum(tensor.nbytes for tensor in self.full.values()) + sum(p.nbytes for p in self.patches.values())


def plan_shipment(
    new: Mapping[str, Tensor],
    new_prints: Mapping[str, Fingerprint],
    old_prints: Mapping[str, Fingerprint] | None,
    old: Mapping[str, Tensor] | None,
    units: Mapping[str, str],
    mode: Literal["full", "changed", "delta"],
) -> Shipment:
    """Decide what travels.

    new, new_prints: the version to publish. old_prints: what the receiver holds, None if it holds nothing: then, and
    in mode `full`, everything travels. old: the tensors of `old_prints`, which only mode `delta` reads. units: the
    name of what the receiver loads at once with this tensor (q, k and v make one layer), for tensors that have
    company. Mode `changed` sends whole units of which a tensor changed; mode `delta` of the changed tensors alone
    what is smaller, patch or tensor, to a receiver that keeps the others itself.
    """
    full_nbytes = sum(tensor.nbytes for tensor in new.values())
    if mode == "full" or old_prints is None:
        return Shipment(dict(new), {}, (), full_nbytes)
    assert old_prints.keys() == new_prints.keys() == new.keys(), "versions of one model have the same tensors"
    changed = {name for name in new if new_prints[name] != old_prints[name]}
    if mode == "changed":
        moved = {units.get(name, name) for name in changed}
        changed = {name for name in new if units.get(name, name) in moved}
    full: dict[str, Tensor] = {}
    patches: dict[str, Patch] = {}
    for name in (name for name in new if name in changed):
        patch = None
        if mode == "delta":
            assert old is not None, "a patch needs the tensors that the receiver holds"
            patch = patch_of(old[name], new[name])
        if patch is not None and patch.nbytes < new[name].nbytes:
            patches[name] = patch
        else:
            full[name] = new[name]
    return Shipment(full, patches, tuple(name for name in new if name not in changed), full_nbytes)


def flatten(shipment: Shipment) -> dict[str, Tensor]:
    """The shipment as tensors that a carrier takes: whole ones by name, then `<name>#indices`, `<name>#values`."""
    flat = dict(shipment.full)
    for name, patch in shipment.patches.items():
        flat |= {name + INDICES: patch.indices, name + VALUES: patch.values}
    return flat


def unflatten(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor | Patch]]:
    """What arrived of a flattened shipment, in its order: whole tensors and patches by tensor name."""
    arriving = iter(tensors)
    for name, tensor in arriving:
        if name.endswith(INDICES):
            values_name, values = next(arriving)
            name = name.removesuffix(INDICES)
            assert values_name == name + VALUES, f"{values_name} follows the indices of {name}"
            yield name, Patch(tensor, values)
        else:
            yield name, tensor
