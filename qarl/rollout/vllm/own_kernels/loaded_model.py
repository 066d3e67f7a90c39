"""Finds the published tensors in a loaded vLLM model, and verifies them there after every publish.

vLLM fuses layers (q, k and v), and transposes and repacks weights for its kernels. After the first full load from a
checkpoint, each published tensor is looked up in its layer: unchanged, as rows of the fused tensor, transposed, or in
another dtype. If it is found, every later publish must put the sent bytes there. If the kernel's layout hides it, the
layer's bytes must change exactly if the sent tensors change, which detects a layer that a reload dropped or left stale.
The canary covers what such a layer computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from qarl.utils.expert_names import expert_stacks
from qarl.weight_sync.fingerprints import METADATA, Fingerprint, PublishError, fingerprints, verify

EXPERTS = "routed_experts"  # name of vLLM's module with the experts of a layer
# Parameters of experts that have no published tensor and that no kernel reads. Their memory is uninitialized.
UNSENT = ("_g_idx", "_sort_indices", "_input_scale", "_input_global_scale")
SMALL = 1 << 20  # bytes; copies of smaller tensors take less time than their launches


@dataclass(frozen=True)
class Unit:
    """Published modules that share tensors in one layer of vLLM, such as q, k and v. A layer is loaded as a whole.

    Attributes:
        name: vLLM's name of the layer.
        sources: Names of the published modules, in the order of their rows in the layer's tensors.
        stem: Prefix of the names of these tensors in the layer.
        members: For experts published as one stack, the names of the modules in the stack.
    """

    name: str
    sources: tuple[str, ...]
    stem: str = ""
    members: tuple[str, ...] = ()


def load_units(model: nn.Module) -> dict[str, Unit]:
    """Return the unit of each published module, by the module's published name.

    Fused layers are those in the model's `packed_modules_mapping`. The experts of a layer form two units (gate and up;
    down) with the same layer name, and so do the two stacks that they may be published as. Every other module is a unit
    of its own.
    """
    fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    units: dict[str, Unit] = {}
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
class _Location:
    """Where a published tensor is: rows [start, stop) of a layer's tensor, after transposing it if `transposed`."""

    layer: str
    attribute: str
    start: int
    stop: int
    transposed: bool


class LoadedModel:
    """A loaded vLLM model and the locations of the published tensors in it.

    Args:
        model: The vLLM model, just loaded from a checkpoint.
        expected: Fingerprints of the snapshot in that checkpoint, by published name.

    Attributes:
        units: Result of `load_units`.
        direct: Location of each published tensor that was found, by name.
        opaque: Layers in which a published tensor was not found, except the blind ones.
        blind: Layers in which a published tensor was not found, and whose weights are not among their tensors because a
            library stores them. Only the canary covers them.
        plain: Layers whose tensors are exactly the published ones.
        proved_frac: Fraction of the published bytes in `direct` tensors.
    """

    def __init__(self, model: nn.Module, expected: Mapping[str, Fingerprint]) -> None:
        self._model = model
        self._modules = dict(model.named_modules())
        self.units = load_units(model)
        self._names: dict[str, list[str]] = {}  # names of the published tensors of each unit
        for name in expected:
            self._names.setdefault(self.unit_of(name).name, []).append(name)
        self.direct: dict[str, _Location] = {}
        self._starts: dict[tuple[tuple[str, ...], str], dict[str, int]] = {}
        hidden: dict[str, None] = {}
        for name, fingerprint in expected.items():
            if name.endswith(METADATA):
                continue
            unit = self.unit_of(name)
            location = self._find(name, fingerprint, unit, expected)
            if location is not None:
                self.direct[name] = location
            else:
                hidden[unit.name] = None
        sent_bytes = {name: sum(expected[n].nbytes for n in self._names[name]) for name in hidden}
        held_bytes = {name: sum(t.nbytes for t in _own_tensors(self._modules[name]).values()) for name in hidden}
        self.blind = tuple(name for name in hidden if held_bytes[name] < 0.9 * sent_bytes[name])
        self.plain = self._plain_units()
        total = sum(p.nbytes for p in expected.values())
        self.proved_frac = sum(expected[name].nbytes for name in self.direct) / total
        self.opaque = tuple(name for name in hidden if name not in self.blind)
        self._sent, self._held = self._sent_fingerprints(expected), self._model_fingerprints()

    def unit_of(self, name: str) -> Unit:
        """Return the unit of a published tensor. Raises PublishError if the model has no such layer."""
        unit = self.units.get(name.rpartition(".")[0])
        if unit is None:
            raise PublishError(f"publish: vLLM's model has no layer for '{name}'; its architecture differs")
        return unit

    def read(self, names: Iterable[str], expected: Mapping[str, Fingerprint]) -> Iterator[tuple[str, Tensor]]:
        """Yield direct tensors as they are in the model now, in published shape and dtype."""
        for name in names:
            tensor = self._tensor_at(self.direct[name])
            assert tensor is not None, f"{name} is no longer where it was"
            yield name, _as_published(tensor, expected[name])

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy published tensors of plain layers, by name, into the model."""
        small: tuple[list[Tensor], list[Tensor]] = ([], [])
        for name, tensor in tensors.items():
            location = self.direct[name]
            held = self._tensor_at(location)
            assert held is not None and location.layer in self.plain, f"{name} has no location of its own"
            if tensor.nbytes < SMALL and held.dtype == tensor.dtype and held.is_contiguous():
                small[0].append(held)
                small[1].append(tensor)
            else:
                held.copy_(tensor)
        for dtype in {tensor.dtype for tensor in small[1]}:  # one launch for all small tensors of a dtype
            held_tensors, sent = ([t for t in side if t.dtype == dtype] for side in small)
            torch._foreach_copy_(held_tensors, sent)

    def check(self, version: int, expected: Mapping[str, Fingerprint]) -> None:
        """Raise PublishError unless the model has the expected snapshot, as far as its layout shows."""
        direct = {name: expected[name] for name in self.direct}
        verify(version, direct, fingerprints(self.read(self.direct, expected)), "vLLM")
        sent, held = self._sent_fingerprints(expected), self._model_fingerprints()
        for layer in self.opaque:
            moved = sent[layer] != self._sent[layer]
            if moved != (held[layer] != self._held[layer]):
                what = "did not change with its weights" if moved else "changed by itself"
                raise PublishError(f"publish of version {version}: vLLM's layer '{layer}' {what}")
        self._sent, self._held = sent, held

    def _tensor_at(self, location: _Location) -> Tensor | None:
        """Return a view of the tensor at a location; None if the layer has no such tensor."""
        held = _own_tensors(self._modules[location.layer]).get(location.attribute)
        if held is not None and held.dim() == 3 and held.is_contiguous():
            held = held.flatten(0, 1)  # (experts, rows, ...): the rows of all experts
        if held is None or held.dim() == 0 or (location.transposed and held.dim() != 2):
            return None
        return (held.t() if location.transposed else held)[location.start : location.stop]

    def _find(
        self, name: str, fingerprint: Fingerprint, unit: Unit, expected: Mapping[str, Fingerprint]
    ) -> _Location | None:
        module_name, _, suffix = name.rpartition(".")
        start = self._rows_before(unit, suffix, expected)[module_name]
        for transposed in (False, True):
            location = _Location(unit.name, f"{unit.stem}{suffix}", start, start + fingerprint.shape[0], transposed)
            tensor = self._tensor_at(location)
            if tensor is None or tuple(tensor.shape) != tuple(fingerprint.shape):
                continue
            if fingerprints([(name, _as_published(tensor, fingerprint))])[name] == fingerprint:
                return location
        return None

    def _rows_before(self, unit: Unit, suffix: str, expected: Mapping[str, Fingerprint]) -> dict[str, int]:
        """Return the first row of each source of a unit in the layer's tensor with this suffix."""
        key = unit.sources, suffix
        if key not in self._starts:
            rows = [expected[name].shape[0] if (name := f"{one}.{suffix}") in expected else 0 for one in unit.sources]
            self._starts[key] = dict(zip(unit.sources, accumulate(rows[:-1], initial=0), strict=True))
        return self._starts[key]

    def _plain_units(self) -> frozenset[str]:
        found = set()
        for unit, names in self._names.items():
            locations = [self.direct[name] for name in names if name in self.direct]
            own = {location.attribute for location in locations}
            if len(locations) == len(names) and own == _own_tensors(self._modules[unit]).keys():
                found.add(unit)
        return frozenset(found)

    def _sent_fingerprints(self, expected: Mapping[str, Fingerprint]) -> dict[str, list[Fingerprint]]:
        return {unit: [expected[name] for name in self._names[unit]] for unit in self.opaque}

    def _model_fingerprints(self) -> dict[str, list[Fingerprint]]:
        own = {
            unit: {name: t for name, t in _own_tensors(self._modules[unit]).items() if not name.endswith(UNSENT)}
            for unit in self.opaque
        }
        named = ((f"{unit} {name}", tensor) for unit, tensors in own.items() for name, tensor in tensors.items())
        found = iter(fingerprints(named).values())
        return {unit: [next(found) for _ in tensors] for unit, tensors in own.items()}


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module, without those of its children."""
    return {name: t for group in (module._parameters, module._buffers) for name, t in group.items() if t is not None}


def _as_published(tensor: Tensor, fingerprint: Fingerprint) -> Tensor:
    """Convert to the published dtype. If vLLM widened 16-bit values to float32, inexact ones become NaN."""
    narrow = tensor.to(fingerprint.torch_dtype)
    if tensor.dtype == torch.float32 and narrow.dtype in (torch.bfloat16, torch.float16):
        narrow = torch.where(narrow.float() == tensor, narrow, torch.nan)
    return narrow.contiguous()
