"""What is published: the tensors of one policy version, with a manifest that can prove their arrival."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from qarl_formats.quantize import QuantizedWeight
from torch import Tensor

from qarl.errors import UserError


class PublishError(UserError):
    """The sampler does not hold what the learner published."""


@dataclass(frozen=True)
class Snapshot:
    """The policy at one version: what the learner's forward reads, what is published, what is exported.

    version: optimizer steps taken. tensors: in layer order, names as compressed-tensors writes them
    (`model.layers.0.mlp.up_proj.weight_packed`, ...), unquantized parameters in the compute dtype under their own
    names. weights: the quantized linears by module name; their tensors are the objects in `tensors`.
    """

    version: int
    tensors: Mapping[str, Tensor]
    weights: Mapping[str, QuantizedWeight]

    def manifest(self) -> Manifest:
        return Manifest(self.version, {name: describe(tensor) for name, tensor in self.tensors.items()})


@dataclass(frozen=True)
class TensorRecord:
    """shape, dtype (as torch prints it) and sha256 of the bytes in row-major order."""

    shape: tuple[int, ...]
    dtype: str
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a snapshot must contain: one record per tensor, in layer order."""

    version: int
    records: Mapping[str, TensorRecord]


def describe(tensor: Tensor) -> TensorRecord:
    """Shape, dtype and digest of a tensor on any device."""
    flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return TensorRecord(tuple(tensor.shape), str(tensor.dtype), hashlib.sha256(flat.numpy()).hexdigest())


def verify(manifest: Manifest, held: Iterable[tuple[str, Tensor]]) -> None:
    """Raise `PublishError` unless `held` is exactly what the manifest lists: every name, shape, dtype and byte."""
    seen = set()
    for name, tensor in held:
        record = manifest.records.get(name)
        if record is None:
            raise PublishError(f"publish of version {manifest.version}: the sampler holds '{name}', which was not sent")
        found = describe(tensor)
        if found != record:
            what = "bytes" if found.shape == record.shape and found.dtype == record.dtype else \
                f"{found.dtype} {found.shape} for {record.dtype} {record.shape}"  # fmt: skip
            raise PublishError(f"publish of version {manifest.version}: '{name}' differs in the sampler ({what})")
        seen.add(name)
    missing = [name for name in manifest.records if name not in seen]
    if missing:
        raise PublishError(f"publish of version {manifest.version} is partial: {len(missing)} of "
                           f"{len(manifest.records)} tensors did not arrive, first '{missing[0]}'")  # fmt: skip
