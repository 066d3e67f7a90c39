"""The published tensors of one policy version in a sampler's own process, in the layout of qarl's products.

The first load allocates memory. Later loads copy into it, so CUDA graphs stay valid. Triton
kernels multiply with a packed linear (q, k and v; gate and up; all experts of a layer) as one weight. Plain torch
multiplies with one weight per module, in the learner's shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain

import torch
from qarl_formats.bits import Proof
from qarl_formats.scheme import Scheme
from qarl_formats.weight import UNQUANTIZED, LowBitWeight, can_concatenate, concatenate
from torch import Tensor

from qarl.policy.decoder import Decoder
from qarl.policy.linear import PackedLinear
from qarl.policy.weights import WeightSet
from qarl.utils.expert_names import expert_stacks, experts_of
from qarl.weight_sync.expert_tensors import join_experts, part_experts
from qarl.weight_sync.fingerprints import METADATA, Fingerprint, PublishError, fingerprints, verify


class PublishedWeights:
    """Weights of a decoder, allocated once and filled by every publish.

    Args:
        scheme_of: The scheme of a parameter by its name; None if it is not quantized.
        dtype: Of activations and of unquantized weights.
        device: On a GPU, Triton kernels multiply.
        tied: Whether the output layer is the embedding.
        kv_fp8: See `WeightSet`.
    """

    def __init__(
        self,
        decoder: Decoder,
        scheme_of: Callable[[str], Scheme | None],
        dtype: torch.dtype,
        device: torch.device,
        tied: bool,
        kv_fp8: bool,
    ) -> None:
        self._scheme_of = lambda name: scheme_of(name) or UNQUANTIZED
        self._dtype, self._device, self._kv_fp8 = dtype, device, kv_fp8
        self._kernels = device.type == "cuda"
        self._head_name = decoder.embedding_name if tied else "lm_head.weight"
        self._linears = decoder.linears
        self._joined = {one.names: _joined_name(one) for one in self._linears if one.experts is not None}
        self._linear_of = {module: one for one in self._linears for module in one.names}
        self._shapes = {
            module: (width, master.shape[1])
            for one in self._linears
            for module, width, master in zip(one.names, one.widths, one.masters, strict=True)
        }
        self._linear_of |= {self._joined[one.names]: one for one in self._linears if one.names in self._joined}
        self._weights: dict[tuple[str, ...], list[LowBitWeight]] = {}
        self._values: dict[str, Tensor] = {}
        self._biases: dict[tuple[str, ...], Tensor] = {}
        self._read: tuple[tuple[str, ...], dict[str, Tensor]] = ((), {})

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take published tensors by name; the first load takes all of them, later ones any part.

        A layer's experts may come one by one, as in a checkpoint, or joined as `Snapshot.published` has them.
        """
        self._read = ((), {})
        arrived: dict[tuple[str, ...], dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            module, _, suffix = name.rpartition(".")
            one = self._linear_of.get(module)
            if name.endswith(METADATA):
                continue
            if one is not None and suffix != "bias":
                arrived.setdefault(one.names, {})[name] = tensor
            elif name in self._values:
                self._values[name].copy_(tensor)
            else:
                self._values[name] = tensor.to(self._device, copy=True)
                if name == self._head_name:  # products in plain torch read it in float32
                    self._head = self._values[name] if self._kernels else self._values[name].float()
        for one in self._linears:
            if one.names in arrived:
                self._fill(one, arrived[one.names])
        if not self._biases:
            self._concatenate_biases()
        if not self._kernels and self._head_name in tensors:
            self._head.copy_(tensors[self._head_name])

    def weight_set(self) -> WeightSet:
        """Return the decoder's weight set, in the memory that later loads fill. Raises PublishError if a tensor is
        missing.
        """
        missing = [one.names[0] for one in self._linears if one.names not in self._weights]
        missing += [self._head_name] if self._head_name not in self._values else []
        if missing:
            raise PublishError(f"publish: the checkpoint lacks '{missing[0]}', which the policy's model has")
        linears = {one: one.parts(self._weights[one.names], self._biases.get(one.names)) for one in self._linears}
        return WeightSet(linears, self._values, self._head, self._kernels, self._kv_fp8)

    def base(self, name: str) -> Tensor:
        """A published tensor as the weights hold it."""
        module, _, suffix = name.rpartition(".")
        one = self._linear_of.get(module)
        if one is None or suffix == "bias":
            return self._values[name]
        if self._read[0] != one.names:
            self._read = one.names, dict(self._published(one, Proof()))
        return self._read[1][name]

    def check(self, version: int, expected: Mapping[str, Fingerprint]) -> None:
        """Raise PublishError unless every operand is what the tensors with these fingerprints make, to the bit."""
        proof = Proof()
        wanted = {name: print_ for name, print_ in expected.items() if not name.endswith(METADATA)}
        linears = chain.from_iterable(self._published(one, proof) for one in self._linears)
        found = fingerprints(chain(self._values.items(), linears))
        if not self._kernels:
            proof.add("the output layer", self._head, self._values[self._head_name].float())
        try:
            proof.settle()
        except ValueError as error:
            raise PublishError(f"publish of version {version}: {error}") from error
        verify(version, wanted, found, "the sampler")

    # --- one packed linear -------------------------------------------------------------------------------------

    def _fill(self, one: PackedLinear, tensors: dict[str, Tensor]) -> None:
        held = self._weights.get(one.names)
        if held is not None and len(tensors) < self._published_count(one):  # a delta sends only what changed
            held_now = {name: tensor.clone() for name, tensor in self._published(one, Proof()) if name not in tensors}
            tensors = held_now | tensors
        fresh = [weight.prepare(self._dtype, self._kernels) for weight in self._weights_of(one, tensors)]
        if held is None:
            self._weights[one.names] = [_in_own_memory(weight) for weight in fresh]
            return
        for weight, new in zip(held, fresh, strict=True):
            for name, operand in weight.operands.items():
                operand.copy_(new.operands[name])

    def _published_count(self, one: PackedLinear) -> int:
        """Return the number of tensors of a packed linear in `Snapshot.published`."""
        modules = one.names if one.names not in self._joined else one.names[:1]
        return sum(len(self._suffixes(module)) for module in modules)

    def _weights_of(self, one: PackedLinear, tensors: Mapping[str, Tensor]) -> list[LowBitWeight]:
        """The stored weights: all rows as one for Triton kernels, else one per module."""
        tensors = {name: tensor.to(self._device) for name, tensor in tensors.items()}
        joined = self._joined.get(one.names)
        if joined is not None and f"{joined}.{self._suffixes(one.names[0])[0]}" in tensors:
            if self._kernels:
                return [self._joined_weight(one, {name.rpartition(".")[2]: t for name, t in tensors.items()})]
            tensors = dict(part_experts(tensors.items(), {joined: one.names}))
        weights = []
        for module in one.names:
            own = {suffix: tensors[f"{module}.{suffix}"] for suffix in self._suffixes(module)}
            weights.append(LowBitWeight(self._scheme_of(f"{module}.weight"), own, self._shapes[module]))
        return [concatenate(weights)] if self._kernels and can_concatenate(weights) else weights

    def _joined_weight(self, one: PackedLinear, tensors: Mapping[str, Tensor]) -> LowBitWeight:
        """One weight of all experts from the tensors that `join_experts` made."""
        scheme = self._scheme_of(f"{one.names[0]}.weight")
        # A tensor without rows is the same for all experts.
        own = {s: t if scheme.rows_per_entry(s) is not None else t[:1] for s, t in tensors.items()}
        return LowBitWeight(scheme, own, (sum(one.widths), self._shapes[one.names[0]][1]))

    def _suffixes(self, module: str) -> list[str]:
        """Names of the stored tensors of a module's weight, without metadata."""
        scheme = self._scheme_of(f"{module}.weight")
        names = scheme.tensor_specs(*self._shapes[module]) if scheme.quantized else ("weight",)
        return [name for name in names if not f".{name}".endswith(METADATA)]

    # --- what is held ------------------------------------------------------------------------------------------

    def _published(self, one: PackedLinear, proof: Proof) -> Iterable[tuple[str, Tensor]]:
        """The published tensors of a packed linear by name, read back from the operands; experts are joined."""
        place = proof.of(f"{one.names[0]}: ")
        weights, joined = self._weights[one.names], self._joined.get(one.names)
        if joined is not None and len(weights) == 1:
            return self._joined_tensors(joined, len(one.names), weights[0].stored(place))
        stored: list[Mapping[str, Tensor]] = [weight.stored(place) for weight in weights]
        if len(weights) < len(one.names):
            whole = LowBitWeight(weights[0].scheme, stored[0], weights[0].shape)
            stored = [part.tensors for part in whole.split(one.widths)]
        named = {
            f"{module}.{suffix}": tensor
            for module, own in zip(one.names, stored, strict=True)
            for suffix, tensor in own.items()
            if suffix != "weight_shape"
        }
        return (named if joined is None else join_experts(named)).items()

    @staticmethod
    def _joined_tensors(joined: str, members: int, stored: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for suffix, tensor in stored.items():
            if suffix != "weight_shape":
                yield f"{joined}.{suffix}", tensor.repeat(members) if suffix == "weight_global_scale" else tensor

    def _concatenate_biases(self) -> None:
        """Concatenate the biases of each packed linear; the biases of its layers become views."""
        for one in self._linears:
            names = [f"{name}.bias" for name in one.names]
            if one.biases:
                self._biases[one.names] = torch.cat([self._values[name] for name in names])
                self._values |= zip(names, self._biases[one.names].split(list(one.widths)), strict=True)


def _in_own_memory(weight: LowBitWeight) -> LowBitWeight:
    """The weight with operands in memory of its own, and no other tensors."""
    # The tiled weight is as large as the packed one and stands for it.
    names = set(weight.operands) - ({"weight_packed"} if "weight_tiled" in weight.operands else set())
    operands = {name: operand.clone() for name, operand in weight.operands.items() if name in names}
    return replace(weight, tensors=operands, operands=operands)


def _joined_name(experts: PackedLinear) -> str:
    """The name under which `join_experts` publishes all experts of a packed linear."""
    owner = experts_of(experts.names[0].rpartition(".")[0])
    assert owner is not None and experts.experts is not None, f"{experts.names[0]} is no expert"
    return next(name for name, members in expert_stacks(owner, experts.experts).items() if members == experts.names)
