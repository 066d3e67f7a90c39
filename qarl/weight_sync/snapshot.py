"""The tensors of one policy version, the layout of their model, and the manifest that files are checked against."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain

import torch
from qarl_formats.compressed import to_state_dict
from qarl_formats.scheme import Scheme
from qarl_formats.weight import LowBitWeight, can_concatenate, concatenate
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

from qarl.utils.packed_linears import fused_groups
from qarl.weight_sync.expert_tensors import join_experts
from qarl.weight_sync.fingerprints import METADATA, Fingerprint, fingerprints
from qarl.weight_sync.transport import aligned


@dataclass(frozen=True)
class ModelLayout:
    """Shape, format and device of the model in snapshots.

    Attributes:
        config: Hugging Face configuration of the unquantized model.
        generation: The model's generation config, if it has one; names the tokens that end a response.
        scheme: Quantization scheme of the linear layers.
        ignore: Linear layers that are not quantized (`quant.ignore`).
        dtype: dtype of activations and of everything that is not quantized.
        device: Device of the snapshots.
        max_length: Maximum tokens of prompt and response.
    """

    config: PreTrainedConfig
    generation: GenerationConfig | None
    scheme: Scheme
    ignore: list[str]
    dtype: torch.dtype
    device: torch.device
    max_length: int

    @property
    def layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def kv_heads(self) -> int:
        """Attention heads with their own keys and values."""
        return self.config.num_key_value_heads

    @property
    def head_dim(self) -> int:
        """Features per attention head."""
        given = getattr(self.config, "head_dim", None)
        return given or self.config.hidden_size // self.config.num_attention_heads


@dataclass(frozen=True)
class Snapshot:
    """The policy's tensors at one version, for the learner's forward, publishes and exports.

    Attributes:
        version: Optimizer steps taken.
        tensors: In layer order, under the names of compressed-tensors (`model.layers.0.mlp.up_proj.weight_packed`,
            ...); unquantized parameters in the compute dtype under their own names.
        weights: The quantized linears by module name; their tensors are the objects in `tensors`.
        groups: Packed linears (q, k and v; gate and up; all experts of a layer) by the names of their modules. The
            tensors of the modules are views of the group's tensors. A group whose weights cannot be concatenated (see
            `can_concatenate`) is missing.
    """

    version: int
    tensors: dict[str, Tensor]
    weights: dict[str, LowBitWeight]
    groups: dict[tuple[str, ...], LowBitWeight] = field(default_factory=dict)

    def weight(self, module: str) -> LowBitWeight:
        """The weight of a linear, quantized or not."""
        weight = self.weights.get(module)
        return LowBitWeight.of_values(self.tensors[f"{module}.weight"]) if weight is None else weight

    def packed(self, modules: tuple[str, ...]) -> list[LowBitWeight]:
        """Return the weights of linears with the same input: one if they are a group, else one per module."""
        whole = self.groups.get(modules)
        return [self.weight(module) for module in modules] if whole is None else [whole]

    @cached_property  # allowed in a frozen dataclass: it writes to `__dict__`, and is not a field
    def published(self) -> dict[str, Tensor]:
        """Return `tensors` as they are sent to a sampler, with experts joined; see `join_experts`."""
        return join_experts(self.tensors)

    @cached_property
    def fingerprints(self) -> Mapping[str, Fingerprint]:
        """Fingerprints of `published` by name: what a sampler of this version must hold."""
        return fingerprints(self.published.items())

    def copied(self, buffer_of: Callable[[int], Tensor]) -> Snapshot:
        """Return a copy with all tensors in one buffer, on any device; see `copy_tensors`."""
        parts = [self.tensors, *(weight.tensors for weight in chain(self.weights.values(), self.groups.values()))]
        named = chain.from_iterable(part.items() for part in parts)
        copies = copy_tensors((t for name, t in named if not f".{name}".endswith(METADATA)), buffer_of)

        def moved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: copies.get(id(tensor), tensor) for name, tensor in tensors.items()}

        weights = {name: replace(one, tensors=moved(one.tensors)) for name, one in self.weights.items()}
        groups = {names: replace(one, tensors=moved(one.tensors)) for names, one in self.groups.items()}
        return Snapshot(self.version, moved(self.tensors), weights, groups)

    def manifest(self) -> Manifest:
        """Return the sha256 of every tensor, as checkpoints and exports record it."""
        return Manifest(self.version, {name: describe(tensor) for name, tensor in self.tensors.items()})


def copy_tensors(tensors: Iterable[Tensor], buffer_of: Callable[[int], Tensor]) -> dict[int, Tensor]:
    """Copy tensors into one buffer. Views of one tensor become views of one copy.

    Copying such copies again is a single transfer. To and from pinned memory it does not synchronize.

    Args:
        tensors: Tensors on one device. Their storages are copied whole.
        buffer_of: Returns an uninitialized uint8 buffer of the given number of bytes, on any device.

    Returns:
        The copies by `id` of the tensor.
    """
    own = list(tensors)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in own}
    *offsets, size = accumulate((aligned(storage.nbytes()) for storage in storages.values()), initial=0)
    start_of = dict(zip(storages, offsets, strict=True))
    buffer = buffer_of(size)
    for address, storage in storages.items():
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        buffer[start_of[address] :][: len(whole)].copy_(whole, non_blocking=True)

    def copy_of(tensor: Tensor) -> Tensor:
        start = start_of[tensor.untyped_storage().data_ptr()] // tensor.itemsize + tensor.storage_offset()
        empty = torch.empty(0, dtype=tensor.dtype, device=buffer.device)
        return empty.set_(buffer.untyped_storage(), start, tensor.shape, tensor.stride())

    return {id(tensor): copy_of(tensor) for tensor in own}


def build_snapshot(version: int, parameters: Iterable[tuple[str, LowBitWeight | Tensor]]) -> Snapshot:
    """Build a snapshot from stored parameters, by name in layer order.

    The weights of a group are concatenated, so that forwards need no second copy; this copies nothing if they are
    adjacent in memory already. The separate tensors of a group are freed before the next group is copied, unless the
    caller keeps them. Weights stay separate if `can_concatenate` is false.
    """
    found = dict(parameters)
    groups: dict[tuple[str, ...], LowBitWeight] = {}
    for names in fused_groups(name.removesuffix(".weight") for name in found if name.endswith(".weight")):
        members = [found[f"{name}.weight"] for name in names]
        weights = [LowBitWeight.of_values(p) if isinstance(p, Tensor) else p for p in members]
        if len(weights) > 1 and can_concatenate(weights):
            whole = groups[tuple(names)] = concatenate(weights)
            for name, part in zip(names, whole.split([weight.shape[0] for weight in weights]), strict=True):
                found[f"{name}.weight"] = part if part.quantized else part.tensors["weight"]
    tensors: dict[str, Tensor] = {}
    for name, parameter in found.items():
        tensors |= named_tensors(name, parameter)
    quantized = {name.removesuffix(".weight"): one for name, one in found.items() if isinstance(one, LowBitWeight)}
    return Snapshot(version, tensors, quantized, groups)


def named_tensors(name: str, parameter: LowBitWeight | Tensor, unpacked: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one stored parameter under their full names. unpacked: see `to_state_dict`."""
    if isinstance(parameter, Tensor):
        yield name, parameter
    else:
        yield from to_state_dict(name.removesuffix(".weight"), parameter, unpacked).items()


@dataclass(frozen=True)
class TensorRecord:
    """Shape, dtype (as torch prints it) and sha256 of a tensor's bytes in row-major order."""

    shape: tuple[int, ...]
    dtype: str
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of a snapshot: one record per tensor, in layer order."""

    version: int
    records: Mapping[str, TensorRecord]

    def digest(self) -> str:
        """One sha256 over all records."""
        records = {name: (r.shape, r.dtype, r.sha256) for name, r in self.records.items()}
        return hashlib.sha256(json.dumps(records).encode()).hexdigest()


def describe(tensor: Tensor) -> TensorRecord:
    """Return the record of a tensor on any device."""
    flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return TensorRecord(tuple(tensor.shape), str(tensor.dtype), hashlib.sha256(flat.numpy().data).hexdigest())
