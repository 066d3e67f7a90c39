"""What is published: the tensors of one policy version, and the manifest that files of it are checked against."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from qarl_formats.rows import concatenate_rows
from qarl_formats.scheme import Scheme, check_shape
from qarl_formats.weight import LowBitWeight, quantize_weight
from torch import Tensor

from qarl.errors import UserError
from qarl.weight_sync.expert_tensors import join_experts
from qarl.weight_sync.fingerprints import Fingerprint, fingerprints
from qarl.weight_sync.joined import runs


@dataclass(frozen=True)
class Snapshot:
    """The policy at one version: what the learner's forward reads, what is published, what is exported.

    version: optimizer steps taken. tensors: in layer order, names as compressed-tensors writes them
    (`model.layers.0.mlp.up_proj.weight_packed`, ...), unquantized parameters in the compute dtype under their own
    names. weights: the quantized linears by module name; their tensors are the objects in `tensors`. groups: linears
    that are multiplied as one, by the modules' names, whose tensors in `tensors` share their memory.
    """

    version: int
    tensors: dict[str, Tensor]
    weights: dict[str, LowBitWeight]
    groups: dict[tuple[str, ...], LowBitWeight] = field(default_factory=dict)

    def weight(self, module: str) -> LowBitWeight:
        """The weight of a linear, quantized or not."""
        weight = self.weights.get(module)
        return LowBitWeight.of_values(self.tensors[f"{module}.weight"]) if weight is None else weight

    @cached_property  # which writes past a frozen dataclass's guard, to a place that comparisons do not see
    def published(self) -> dict[str, Tensor]:
        """`tensors` as they travel to a sampler, those of a layer's experts as few: see `join_experts`."""
        return join_experts(self.tensors)

    def fingerprints(self) -> Mapping[str, Fingerprint]:
        """Fingerprints of `published` by name, computed once: what a sampler of this version must show."""
        return self._fingerprints

    @cached_property
    def _fingerprints(self) -> Mapping[str, Fingerprint]:
        return fingerprints(self.published.items())

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
) -> LowBitWeight | Tensor:
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
    if bad := value.isfinite().logical_not_().sum().item():
        raise not_finite(version, name, scheme, dtype, int(bad), value.numel())
    return value


def not_finite(version: int, name: str, scheme: Scheme | None, dtype: torch.dtype, bad: int, total: int) -> UserError:
    """What to say of a parameter that cannot be published, because `bad` of its values are NaN or infinite."""
    why = f"in {dtype}" if scheme is None else "and cannot be quantized"
    return UserError(
        f"quantize version {version}: {name}: {bad} of {total} values are NaN or infinite {why}; "
        "go back to an earlier checkpoint or lower the learning rate"
    )


@torch.no_grad()
def quantize_parameters(
    masters: Mapping[str, Tensor],
    scheme_of: Callable[[str], Scheme | None],
    dtype: torch.dtype,
    version: int,
    kernels: bool = False,
    shared: Mapping[str, Tensor] | None = None,
    stacks: Iterable[Sequence[str]] = (),
) -> Snapshot:
    """The snapshot of all masters, given by name in layer order: `quantize_parameter` of each, bit for bit.

    A GPU is waited for once, after the last, where `quantize_parameter` waits for each to know whether it is finite.
    scheme_of: of a parameter's name. shared: by name, see `qarl.fused.shared_scales`. stacks: names of weights that are
    quantized at once where their masters lie under one another, with what they share; their stored tensors then lie
    so too. Raises UserError as `quantize_parameter` does, of tensors that are not finite for the first one.
    """
    forms: dict[str, LowBitWeight | Tensor] = {}
    quantizer, shared = Quantizer(dtype, version, kernels), shared or {}
    joined = {run[0]: run for stack in stacks for run in runs(stack, masters, scheme_of)}
    for name, master in masters.items():
        if name in forms:
            continue
        scheme = scheme_of(name)
        if name in joined:
            rows = [masters[one].detach() for one in joined[name]]
            for one, its in zip(joined[name], rows, strict=True):
                quantizer.check(one, its.shape, scheme)
            whole = quantizer.form(name, concatenate_rows(rows), scheme, shared.get(name))
            widths = [len(its) for its in rows]
            forms |= zip(joined[name], whole.split(widths), strict=True)
            continue
        quantizer.check(name, master.shape, scheme)
        forms[name] = quantizer.form(name, master, scheme, shared.get(name))
    names, flags = quantizer.faults()
    faulty = {one for name, flag in zip(names, flags.tolist(), strict=True) if flag for one in joined.get(name, [name])}
    for name in filter(faulty.__contains__, masters):
        master, scheme = masters[name], scheme_of(name)
        if bad := int(quantizer.bad_values(master, scheme).item()):
            raise not_finite(version, name, scheme, dtype, bad, master.numel())
    assert not faulty, "a value that is not finite and was not found again"
    return build_snapshot(version, ((name, forms[name]) for name in masters))


class Quantizer:
    """Masters, or rows of them, to what is published of them, without a look at whether they are finite until `faults`.

    dtype: of what is not quantized. version: of the policy, for errors. kernels: see `quantize_parameter`.
    """

    def __init__(self, dtype: torch.dtype, version: int, kernels: bool) -> None:
        self.dtype, self.version, self.kernels = dtype, version, kernels
        self._counts: dict[str, Tensor] = {}  # of quantized weights: how many of its values are not finite
        self._largest: dict[str, Tensor] = {}  # of others: the largest magnitude, NaN or infinite if any value is

    def check(self, name: str, shape: Sequence[int], scheme: Scheme | None) -> None:
        """Raises UserError where the scheme does not fit the shape of a whole master."""
        if scheme is not None:
            try:
                check_shape(scheme, name, *shape)
            except ValueError as error:
                raise UserError(f"quantize version {self.version}: {error}") from error

    def form(self, name: str, master: Tensor, scheme: Scheme | None, shared: Tensor | None) -> LowBitWeight | Tensor:
        """What is published of a master, or of whole units of its rows, which may come in several calls; those of a
        scheme must not be empty."""
        master = master.detach()
        if scheme is not None:
            try:
                tensors, bad = scheme.quantize(master.contiguous(), self.kernels, shared)
            except ValueError as error:
                raise UserError(f"quantize version {self.version}: {name}: {error}") from error
            bad = bad.reshape(())
            self._counts[name] = self._counts[name] + bad if name in self._counts else bad
            return LowBitWeight(scheme, tensors, (master.shape[0], master.shape[1]))
        value = master.to(self.dtype, copy=True)
        largest = torch.linalg.vector_norm(value, torch.inf) if value.numel() else value.new_zeros(())
        self._largest[name] = torch.maximum(self._largest[name], largest) if name in self._largest else largest
        return value

    def nothing(self, name: str, device: torch.device) -> None:
        """Takes note of a quantized weight of which there are no rows here, or no more."""
        if name not in self._counts:
            self._counts[name] = torch.zeros((), dtype=torch.int32, device=device)

    def faults(self) -> tuple[list[str], Tensor]:
        """(names of all parameters so far, float32 (names,) on their device: 1 where a value is not finite, else 0).

        The names depend on which parameters there were and on their order alone.
        """
        flags = [torch.stack(list(self._counts.values())) != 0] if self._counts else []
        if self._largest:
            flags.append(torch.stack(list(self._largest.values())).isfinite().logical_not_())
        return [*self._counts, *self._largest], torch.cat(flags).float() if flags else torch.zeros(0)

    def bad_values(self, master: Tensor, scheme: Scheme | None) -> Tensor:
        """How many values of a master `not_finite` speaks of: int64 [] on its device."""
        values = master.detach() if scheme is not None else master.detach().to(self.dtype)
        return values.isfinite().logical_not_().sum()


def named_tensors(name: str, form: LowBitWeight | Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one published parameter under their full names. name: the parameter's."""
    if isinstance(form, Tensor):
        yield name, form
    else:
        module = name.removesuffix(".weight")
        yield from ((f"{module}.{suffix}", tensor) for suffix, tensor in form.tensors.items())


def build_snapshot(version: int, forms: Iterable[tuple[str, LowBitWeight | Tensor]]) -> Snapshot:
    """A snapshot of published parameters, given as (parameter name, what `published` made of it) in layer order."""
    tensors: dict[str, Tensor] = {}
    weights: dict[str, LowBitWeight] = {}
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
