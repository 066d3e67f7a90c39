"""What is published: the tensors of one policy version, and the manifest that files of it are checked against."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from qarl_formats.quantize import QuantizedWeight, quantize_weight
from qarl_formats.scheme import Scheme, check_shape
from torch import Tensor

from qarl.errors import UserError
from qarl.weight_sync.fingerprints import Fingerprint, fingerprints


@dataclass(frozen=True)
class Snapshot:
    """The policy at one version: what the learner's forward reads, what is published, what is exported.

    version: optimizer steps taken. tensors: in layer order, names as compressed-tensors writes them
    (`model.layers.0.mlp.up_proj.weight_packed`, ...), unquantized parameters in the compute dtype under their own
    names. weights: the quantized linears by module name; their tensors are the objects in `tensors`.
    """

    version: int
    tensors: dict[str, Tensor]
    weights: dict[str, QuantizedWeight]

    def fingerprints(self) -> Mapping[str, Fingerprint]:
        """Fingerprints of the tensors by name, computed once: what every holder of this version must show."""
        return self._fingerprints

    @cached_property  # which writes past a frozen dataclass's guard, to a place that comparisons do not see
    def _fingerprints(self) -> Mapping[str, Fingerprint]:
        return fingerprints(self.tensors.items())

    def manifest(self) -> Manifest:
        """sha256 of every tensor: what checkpoints and exports record."""
        return Manifest(self.version, {name: describe(tensor) for name, tensor in self.tensors.items()})


def quantize_parameter(
    name: str,
    master: Tensor,
    scheme: Scheme | None,
    dtype: torch.dtype,
    version: int,
    kernels: bool = False,
    shared: Tensor | None = None,
) -> QuantizedWeight | Tensor:
    """What is published of one master: codes and scales in `scheme`, or with None the values rounded to `dtype`.

    name: the parameter's. master: float32, not changed; the result shares no memory with it. kernels: quantize with
    Triton, for a master on a GPU; the tensors are the same. shared: see `qarl.fused.shared_scales`.
    Raises UserError naming the tensor when a value is not finite or the scheme does not fit the shape.
    """
    if scheme is not None:
        try:
            return quantize_weight(master.detach(), scheme, name, kernels, shared)
        except ValueError as error:
            raise UserError(f"quantize version {version}: {error}") from error
    value = master.detach().to(dtype, copy=True)
    if not value.isfinite().all():
        bad = value.isfinite().logical_not_().sum().item()
        raise UserError(
            f"quantize version {version}: {name}: {bad} of {value.numel()} values are NaN or infinite in {dtype}; "
            "go back to an earlier checkpoint or lower the learning rate"
        )
    return value


@torch.no_grad()
def quantize_parameters(
    masters: Mapping[str, Tensor],
    scheme_of: Callable[[str], Scheme | None],
    dtype: torch.dtype,
    version: int,
    kernels: bool = False,
    shared: Mapping[str, Tensor] | None = None,
) -> Snapshot:
    """The snapshot of all masters, given by name in layer order: `quantize_parameter` of each, bit for bit.

    A GPU is waited for once, after the last, where `quantize_parameter` waits for each to know whether it is finite.
    scheme_of: of a parameter's name. shared: by name, see `qarl.fused.shared_scales`. Raises UserError as
    `quantize_parameter` does, of tensors that are not finite for the first one.
    """
    shared = shared or {}
    forms: dict[str, QuantizedWeight | Tensor] = {}
    counts: dict[str, Tensor] = {}  # of quantized weights: how many of its values are not finite
    largest: dict[str, Tensor] = {}  # of others: the largest magnitude, which is NaN or infinite if any value is
    for name, master in masters.items():
        scheme = scheme_of(name)
        if scheme is not None:
            try:
                forms[name], counts[name] = _quantized(name, master.detach(), scheme, kernels, shared.get(name))
            except ValueError as error:
                raise UserError(f"quantize version {version}: {error}") from error
            continue
        value = forms[name] = master.detach().to(dtype, copy=True)
        if value.numel():
            largest[name] = torch.linalg.vector_norm(value, torch.inf)
    faulty = _faulty(counts, largest)
    for name in filter(faulty.__contains__, masters):
        quantize_parameter(name, masters[name], scheme_of(name), dtype, version, kernels, shared.get(name))
    assert not faulty, f"{sorted(faulty)} were not finite, and now they are"
    return build_snapshot(version, forms.items())


def _quantized(
    name: str, master: Tensor, scheme: Scheme, kernels: bool, shared: Tensor | None
) -> tuple[QuantizedWeight, Tensor]:
    """`quantize_weight` without its look at the second part: a scalar on the device, 0 where all values are finite."""
    n, k = master.shape
    check_shape(scheme, name, n, k)
    tensors, bad = scheme.quantize(master.contiguous(), kernels, shared)
    return QuantizedWeight(scheme, tensors, (n, k)), bad.reshape(())


def _faulty(counts: Mapping[str, Tensor], largest: Mapping[str, Tensor]) -> set[str]:
    """Names whose count is not 0 or whose largest magnitude is not finite; one transfer from the device."""
    stacked = [torch.stack(list(some.values())).double() for some in (counts, largest) if some]
    seen = iter(torch.cat(stacked).tolist() if stacked else [])
    return {name for name in counts if next(seen)} | {name for name in largest if not math.isfinite(next(seen))}


def named_tensors(name: str, form: QuantizedWeight | Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one published parameter under their full names. name: the parameter's."""
    if isinstance(form, Tensor):
        yield name, form
    else:
        module = name.removesuffix(".weight")
        yield from ((f"{module}.{suffix}", tensor) for suffix, tensor in form.tensors.items())


def build_snapshot(version: int, forms: Iterable[tuple[str, QuantizedWeight | Tensor]]) -> Snapshot:
    """A snapshot of published parameters, given as (parameter name, what `published` made of it) in layer order."""
    tensors: dict[str, Tensor] = {}
    weights: dict[str, QuantizedWeight] = {}
    for name, form in forms:
        tensors |= named_tensors(name, form)
        if not isinstance(form, Tensor):
            weights[name.removesuffix(".weight")] = form
    return Snapshot(version, tensors, weights)


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

    def digest(self) -> str:
        """One sha256 over all records."""
        records = {name: (r.shape, r.dtype, r.sha256) for name, r in self.records.items()}
        return hashlib.sha256(json.dumps(records).encode()).hexdigest()


def describe(tensor: Tensor) -> TensorRecord:
    """Shape, dtype and digest of a tensor on any device."""
    flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return TensorRecord(tuple(tensor.shape), str(tensor.dtype), hashlib.sha256(flat.numpy().data).hexdigest())
