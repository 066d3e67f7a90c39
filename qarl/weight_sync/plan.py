"""The plan of a weight update: all tensors, or of the tensors that changed only the changed words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from qarl.weight_sync.delta import Patch, patch_of
from qarl.weight_sync.fingerprints import Fingerprint

INDICES, VALUES = "#indices", "#values"  # what the two tensors of a patch are called after the tensor's name


@dataclass(frozen=True)
class UpdatePlan:
    """What one weight update sends, by tensor name in layer order.

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


def plan_update(
    new: Mapping[str, Tensor],
    new_prints: Mapping[str, Fingerprint],
    old_prints: Mapping[str, Fingerprint] | None,
    old: Mapping[str, Tensor] | None,
    mode: Literal["full", "delta"],
) -> UpdatePlan:
    """Decide what travels.

    new, new_prints: the version to publish. old_prints: what the receiver holds, None if it holds nothing: then, and
    in mode `full`, everything travels. old: the tensors of `old_prints`, for mode `delta`: of each changed tensor it
    sends the patch, or the tensor if that is smaller. The receiver keeps the others.
    """
    full_nbytes = sum(tensor.nbytes for tensor in new.values())
    if mode == "full" or old_prints is None:
        return UpdatePlan(dict(new), {}, (), full_nbytes)
    assert old_prints.keys() == new_prints.keys() == new.keys(), "versions of one model have the same tensors"
    assert old is not None, "a patch needs the tensors that the receiver holds"
    changed = {name for name in new if new_prints[name] != old_prints[name]}
    full: dict[str, Tensor] = {}
    patches: dict[str, Patch] = {}
    for name in (name for name in new if name in changed):
        patch = patch_of(old[name], new[name])
        if patch is not None and patch.nbytes < new[name].nbytes:
            patches[name] = patch
        else:
            full[name] = new[name]
    return UpdatePlan(full, patches, tuple(name for name in new if name not in changed), full_nbytes)


def flatten(plan: UpdatePlan) -> dict[str, Tensor]:
    """The plan as tensors that a carrier takes: whole ones by name, then `<name>#indices`, `<name>#values`."""
    flat = dict(plan.full)
    for name, patch in plan.patches.items():
        flat |= {name + INDICES: patch.indices, name + VALUES: patch.values}
    return flat


def unflatten(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor | Patch]]:
    """What arrived of a flattened plan, in its order: whole tensors and patches by tensor name."""
    arriving = iter(tensors)
    for name, tensor in arriving:
        if name.endswith(INDICES):
            values_name, values = next(arriving)
            name = name.removesuffix(INDICES)
            assert values_name == name + VALUES, f"{values_name} follows the indices of {name}"
            yield name, Patch(tensor, values)
        else:
            yield name, tensor
