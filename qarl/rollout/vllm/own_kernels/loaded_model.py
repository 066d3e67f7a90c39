"""Finds the published tensors in vLLM's layers, and verifies them there after every publish.

vLLM fuses layers (q, k and v), transposes and repacks weights for its kernels. After the first full load from a
checkpoint each published tensor is searched in its layer: unchanged, as rows of the fused tensor, transposed, or in
another dtype. If it is found, every later publish must be found there too, byte for byte. If the kernel's layout hides
it, the layer must change exactly when the sent tensors change, which detects a layer that a reload dropped or left
stale; the canary covers what such a layer computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from qarl.utils.expert_names import expert_stacks
from qarl.weight_sync.fingerprints import METADATA, Fingerprint, PublishError, fingerprints, verify

EXPERTS = "routed_experts"  # vLLM's module with the experts of a layer
# Parameters of experts that have no published tensor and that no kernel reads; their memory is uninitialized.
UNSENT = ("_g_idx", "_sort_indices", "_input_scale", "_input_global_scale")
SMALL = 1 << 20  # bytes; launching the copy of a smaller tensor takes longer than the copy


@dataclass(frozen=True)
class Unit:
    """Published modules that share tensors in one layer of vLLM, which is loaded as a whole.

    Attributes:
        name: vLLM's name of the layer.
        sources: The modules, in the order of their rows.
        stem: Prefix of the names of these tensors.
        members: For experts published as one stack, the modules in it.
    """

    name: str
    sources: tuple[str, ...]
    stem: str = ""
    members: tuple[str, ...] = ()


def load_units(model: nn.Module) -> dict[str, Unit]:
    """The unit of each published module, by the module's published name.

    Fused layers are those in the model's `packed_modules_mapping`. The experts of a layer have two units with one name
    (gate and up; down), and so have the two stacks that they are published as. Every other module is its own unit.
    """
    fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    units = {}
    for name, module in model.named_modules():
        if not _own_tensors(module):
            continue
        parent, _, last = name.rpartition(".")
        if last == EXPERTS:
            for stack, members in expert_stacks(parent, module.moe_config.num_experts).items():
                stem = f"{stack.rpartition('.')[2]}_"
                units |= dict.fromkeys(members, Unit(name, members, stem))
                units[stack] = Unit(name, (stack,), stem, members)
            continue
        sources = tuple(f"{parent}.{part}" if parent else part for part in fused.get(last, (last,)))
        units |= dict.fromkeys(sources, Unit(name, sources))
    return units


@dataclass(frozen=True)
class _Place:
    """Position of a published tensor: rows [start, stop) of a layer's tensor, which may be transposed first."""

    layer: str
    attribute: str
    start: int
    stop: int
    transposed: bool


class LoadedModel:
    """The tensors of a vLLM model, compared with the published ones.

    Args:
        model: The vLLM model, just loaded from a checkpoint.
        expected: Fingerprints of the snapshot in that checkpoint, by published name.

    Attributes:
        direct: Published tensors that were found, by name.
        opaque: Layers whose layout hides some of their tensors.
        blind: Opaque layers whose weights are not among their tensors (a library holds them); only the canary covers
            them.
        plain: Layers whose tensors are exactly their published ones.
        proved_frac: Share of the published bytes that are direct.
    """

    def __init__(self, model: nn.Module, expected: Mapping[str, Fingerprint]) -> None:
        self._model = model
        self._modules = dict(model.named_modules())
        self.units = load_units(model)
        self._names: dict[str, list[str]] = {}  # of published tensors, by unit
        for name in expected:
            self._names.setdefault(self.unit_of(name).name, []).append(name)
        self.direct: dict[str, _Place] = {}
        self._starts: dict[tuple[tuple[str, ...], str], dict[str, int]] = {}
        hidden: dict[str, None] = {}
        for name, print_ in expected.items():
            if name.endswith(METADATA):
                continue
            unit = self.unit_of(name)
            place = self._find(name, print_, unit, expected)
            if place is not None:
                self.direct[name] = place
            else:
                hidden[unit.name] = None
        sent_bytes = {name: sum(expected[n].nbytes for n in self._names[name]) for name in hidden}
        held_bytes = {name: sum(t.nbytes for t in _own_tensors(self._modules[name]).values()) for name in hidden}
        self.blind = tuple(name for name in hidden if held_bytes[name] < 0.9 * sent_bytes[name])
        self.plain = self._plain_units()
        total = sum(p.nbytes for p in expected.values())
        self.proved_frac = sum(expected[name].nbytes for name in self.direct) / total
        self.opaque = tuple(name for name in hidden if name not in self.blind)
        self._sent, self._held = self._sent_prints(expected), self._held_prints()

    def unit_of(self, name: str) -> Unit:
        """The unit of a published tensor. Raises PublishError if the model has no such layer."""
        unit = self.units.get(name.rpartition(".")[0])
        if unit is None:
            raise PublishError(f"publish: vLLM's model has no layer for '{name}': its architecture is not the policy's")
        return unit

    def read(self, names: Iterable[str], expected: Mapping[str, Fingerprint]) -> Iterator[tuple[str, Tensor]]:
        """Direct tensors as the model holds them now, in their published shape and dtype."""
        for name in names:
            tensor = self._tensor_at(self.direct[name])
            assert tensor is not None, f"{name} is no longer where it was"
            yield name, _as_published(tensor, expected[name])

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy published tensors of plain layers, by name, into the model."""
        small: tuple[list[Tensor], list[Tensor]] = ([], [])
        for name, tensor in tensors.items():
            place = self.direct[name]
            held = self._tensor_at(place)
            assert held is not None and place.layer in self.plain, f"{name} has no place of its own"
            if tensor.nbytes < SMALL and held.dtype == tensor.dtype and held.is_contiguous():
                small[0].append(held)
                small[1].append(tensor)
            else:
                held.copy_(tensor)
        for dtype in {tensor.dtype for tensor in small[1]}:  # one launch for all small tensors of a dtype
            torch._foreach_copy_(*([t for t in side if t.dtype == dtype] for side in small))

    def check(self, version: int, expected: Mapping[str, Fingerprint]) -> None:
        """Raise PublishError unless the model holds the expected snapshot, as far as its layout shows."""
        direct = {name: expected[name] for name in self.direct}
        verify(version, direct, fingerprints(self.read(self.direct, expected)), "vLLM")
        sent, held = self._sent_prints(expected), self._held_prints()
        for layer in self.opaque:
            moved = sent[layer] != self._sent[layer]
            if moved != (held[layer] != self._held[layer]):
                what = "did not change with its weights" if moved else "changed by itself"
                raise PublishError(f"publish of version {version}: vLLM's layer '{layer}' {what}")
        self._sent, self._held = sent, held

    def _tensor_at(self, place: _Place) -> Tensor | None:
        """The tensor there, as a view; None if the layer has none of that kind."""
        held = _own_tensors(self._modules[place.layer]).get(place.attribute)
        if held is not None and held.dim() == 3 and held.is_contiguous():
            held = held.flatten(0, 1)  # of all experts
        if held is None or held.dim() == 0 or (place.transposed and held.dim() != 2):
            return None
        return (held.t() if place.transposed else held)[place.start : place.stop]

    def _find(self, name: str, print_: Fingerprint, unit: Unit, expected: Mapping[str, Fingerprint]) -> _Place | None:
        module_name, _, suffix = name.rpartition(".")
        start = self._rows_before(unit, suffix, expected)[module_name]
        for transposed in (False, True):
            place = _Place(unit.name, f"{unit.stem}{suffix}", start, start + print_.shape[0], transposed)
            tensor = self._tensor_at(place)
            if tensor is None or tuple(tensor.shape) != tuple(print_.shape):
                continue
            if fingerprints([(name, _as_published(tensor, print_))])[name] == print_:
                return place
        return None

    def _rows_before(self, unit: Unit, suffix: str, expected: Mapping[str, Fingerprint]) -> dict[str, int]:
        """First row of each source of a unit in the tensor with this suffix."""
        key = unit.sources, suffix
        if key not in self._starts:
            rows = [expected[name].shape[0] if (name := f"{one}.{suffix}") in expected else 0 for one in unit.sources]
            self._starts[key] = dict(zip(unit.sources, accumulate(rows[:-1], initial=0), strict=True))
        return self._starts[key]

    def _plain_units(self) -> frozenset[str]:
        found = set()
        for unit, names in self._names.items():
            places = [self.direct[name] for name in names if name in self.direct]
            own = {place.attribute for place in places}
            if len(places) == len(names) and own == _own_tensors(self._modules[unit]).keys():
                found.add(unit)
        return frozenset(found)

    def _sent_prints(self, expected: Mapping[str, Fingerprint]) -> dict[str, list[Fingerprint]]:
        return {unit: [expected[name] for name in self._names[unit]] for unit in self.opaque}

    def _held_prints(self) -> dict[str, list[Fingerprint]]:
        own = {
            unit: {name: t for name, t in _own_tensors(self._modules[unit]).items() if not name.endswith(UNSENT)}
            for unit in self.opaque
        }
        named = ((f"{unit} {name}", tensor) for unit, tensors in own.items() for name, tensor in tensors.items())
        found = iter(fingerprints(named).values())
        return {unit: [next(found) for _ in tensors] for unit, tensors in own.items()}


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a module itself."""
    return {name: t for group in (module._parameters, module._buffers) for name, t in group.items() if t is not None}


def _as_published(tensor: Tensor, print_: Fingerprint) -> Tensor:
    """Undo vLLM's widening of 16-bit scales to float32; NaN for values that are not exactly 16-bit."""
    narrow = tensor.to(print_.torch_dtype)
    if tensor.dtype == torch.float32 and narrow.dtype in (torch.bfloat16, torch.float16):
        narrow = torch.where(narrow.float() == tensor, narrow, torch.nan)
    return narrow.contiguous()
