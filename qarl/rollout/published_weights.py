"""The published weights in a separate sampler process, in the layout that qarl's matrix products read.

The first load allocates memory. Later loads copy into it, so CUDA graphs stay valid. For Triton kernels a packed linear
(q, k and v; gate and up; all experts of a layer) is one weight. For plain torch every module has its own weight, in the
learner's shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain

import torch
from qarl_formats.bits import Proof
from qarl_formats.scheme import Scheme
from qarl_formats.weight import UNQUANTIZED, LowBitWeight, can_concatenate, concatenate
from qarl_kernels.attention import PAGE
from torch import Tensor
from transformers import PreTrainedConfig

from qarl.policy.decoder import Decoder
from qarl.policy.linear import PackedLinear, WeightSet
from qarl.policy.skeleton import schemes_of, skeleton
from qarl.utils.expert_names import expert_stacks, experts_of
from qarl.weight_sync.expert_tensors import join_experts, part_experts
from qarl.weight_sync.fingerprints import METADATA, Fingerprint, PublishError, fingerprints, verify


class PublishedWeights:
    """A decoder and its weights, allocated once and filled by every publish.

    Args:
        config: Hugging Face configuration of the model.
        scheme: Scheme of the published weights.
        ignore: Modules that are not quantized, as in `quant.ignore`.
        context: Maximum tokens of a sequence.
        dtype: Dtype of activations and of unquantized weights.
        device: Device of the weights. Products run as Triton kernels on a GPU, else in plain torch.
        kv_fp8: See `WeightSet`.

    Attributes:
        decoder: The decoder.
        head_name: Name of the output layer's weight; the embedding's if they are tied.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        scheme: Scheme,
        ignore: list[str],
        context: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_fp8: bool,
    ) -> None:
        model = skeleton(config)
        scheme_of = schemes_of(model, scheme, ignore)
        self.decoder = decoder = Decoder(model.base_model, -(-context // PAGE) * PAGE, {dtype}, device)
        self.head_name = decoder.embedding_name if config.tie_word_embeddings else "lm_head.weight"
        self._scheme_of = lambda name: scheme_of(name) or UNQUANTIZED
        self._dtype, self._device, self._kv_fp8 = dtype, device, kv_fp8
        self._kernels = device.type == "cuda"
        self._linears = decoder.linears
        self._joined = {linear.names: _joined_name(linear) for linear in self._linears if linear.experts is not None}
        self._linear_of = {module: linear for linear in self._linears for module in linear.names}
        self._shapes = {
            module: (width, master.shape[1])
            for linear in self._linears
            for module, width, master in zip(linear.names, linear.widths, linear.masters, strict=True)
        }
        self._linear_of |= {
            self._joined[linear.names]: linear for linear in self._linears if linear.names in self._joined
        }
        self._weights: dict[tuple[str, ...], list[LowBitWeight]] = {}
        self._values: dict[str, Tensor] = {}
        self._biases: dict[tuple[str, ...], Tensor] = {}
        self._last_read: tuple[tuple[str, ...], dict[str, Tensor]] = ((), {})

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load published tensors by name. The first load needs all tensors, later loads any subset.

        The experts of a layer may be separate tensors, as in a checkpoint, or joined, as in `Snapshot.published`.
        """
        self._last_read = ((), {})
        arrived: dict[tuple[str, ...], dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            module, _, suffix = name.rpartition(".")
            linear = self._linear_of.get(module)
            if name.endswith(METADATA):
                continue
            if linear is not None and suffix != "bias":
                arrived.setdefault(linear.names, {})[name] = tensor
            elif name in self._values:
                self._values[name].copy_(tensor)
            else:
                self._values[name] = tensor.to(self._device, copy=True)
                if name == self.head_name:  # plain torch multiplies in float32
                    self._head = self._values[name] if self._kernels else self._values[name].float()
        for linear in self._linears:
            if linear.names in arrived:
                self._fill(linear, arrived[linear.names])
        if not self._biases:
            self._concatenate_biases()
        if not self._kernels and self.head_name in tensors:
            self._head.copy_(tensors[self.head_name])

    def weight_set(self) -> WeightSet:
        """Return the decoder's weights, which later loads update. Raises PublishError if a tensor is missing."""
        missing = [linear.names[0] for linear in self._linears if linear.names not in self._weights]
        missing += [self.head_name] if self.head_name not in self._values else []
        if missing:
            raise PublishError(f"publish: no tensor was published for '{missing[0]}', which the policy's model has")
        linears = {
            linear: linear.parts(self._weights[linear.names], self._biases.get(linear.names))
            for linear in self._linears
        }
        return WeightSet(linears, self._values, self._head, self._kernels, self._kv_fp8)

    def base(self, name: str) -> Tensor:
        """Return a published tensor as last loaded, recovered from the weights. Patches are applied to it."""
        module, _, suffix = name.rpartition(".")
        linear = self._linear_of.get(module)
        if linear is None or suffix == "bias":
            return self._values[name]
        if self._last_read[0] != linear.names:
            self._last_read = linear.names, dict(self._published(linear, Proof()))
        return self._last_read[1][name]

    def check(self, version: int, expected: Mapping[str, Fingerprint]) -> None:
        """Raise PublishError unless the weights that products read have the bits of these published tensors.

        expected: Fingerprints of the whole snapshot, by published name.
        """
        proof = Proof()
        wanted = {name: fingerprint for name, fingerprint in expected.items() if not name.endswith(METADATA)}
        linears = chain.from_iterable(self._published(linear, proof) for linear in self._linears)
        found = fingerprints(chain(self._values.items(), linears))
        if not self._kernels:
            proof.add("the output layer", self._head, self._values[self.head_name].float())
        try:
            proof.settle()
        except ValueError as error:
            raise PublishError(f"publish of version {version}: {error}") from error
        verify(version, wanted, found, "the sampler")

    # --- one packed linear -------------------------------------------------------------------------------------

    def _fill(self, linear: PackedLinear, tensors: dict[str, Tensor]) -> None:
        """Load published tensors of a packed linear. Missing ones are recovered from its current weights."""
        held = self._weights.get(linear.names)
        if held is not None and len(tensors) < self._published_count(linear):  # a delta sends only what changed
            held_now = {
                name: tensor.clone() for name, tensor in self._published(linear, Proof()) if name not in tensors
            }
            tensors = held_now | tensors
        fresh = [weight.prepare(self._dtype, self._kernels) for weight in self._weights_of(linear, tensors)]
        if held is None:
            self._weights[linear.names] = [_in_own_memory(weight) for weight in fresh]
            return
        for weight, new in zip(held, fresh, strict=True):
            for name, operand in weight.operands.items():
                operand.copy_(new.operands[name])

    def _published_count(self, linear: PackedLinear) -> int:
        """Return the number of tensors of a packed linear in `Snapshot.published`."""
        modules = linear.names if linear.names not in self._joined else linear.names[:1]
        return sum(len(self._suffixes(module)) for module in modules)

    def _weights_of(self, linear: PackedLinear, tensors: Mapping[str, Tensor]) -> list[LowBitWeight]:
        """Return the weights of a packed linear: one for Triton kernels if possible, else one per module."""
        tensors = {name: tensor.to(self._device) for name, tensor in tensors.items()}
        joined = self._joined.get(linear.names)
        if joined is not None and f"{joined}.{self._suffixes(linear.names[0])[0]}" in tensors:
            if self._kernels:
                return [self._joined_weight(linear, {name.rpartition(".")[2]: t for name, t in tensors.items()})]
            tensors = dict(part_experts(tensors.items(), {joined: linear.names}))
        weights = []
        for module in linear.names:
            own = {suffix: tensors[f"{module}.{suffix}"] for suffix in self._suffixes(module)}
            weights.append(LowBitWeight(self._scheme_of(f"{module}.weight"), own, self._shapes[module]))
        return [concatenate(weights)] if self._kernels and can_concatenate(weights) else weights

    def _joined_weight(self, linear: PackedLinear, tensors: Mapping[str, Tensor]) -> LowBitWeight:
        """Return one weight of all experts from tensors that `join_experts` joined."""
        scheme = self._scheme_of(f"{linear.names[0]}.weight")
        # A tensor without rows is equal for all experts, so its first element is enough.
        own = {s: t if scheme.rows_per_entry(s) is not None else t[:1] for s, t in tensors.items()}
        return LowBitWeight(scheme, own, (sum(linear.widths), self._shapes[linear.names[0]][1]))

    def _suffixes(self, module: str) -> list[str]:
        """Return the names of the stored tensors of a module's weight, without metadata."""
        scheme = self._scheme_of(f"{module}.weight")
        names = scheme.tensor_specs(*self._shapes[module]) if scheme.quantized else ("weight",)
        return [name for name in names if not f".{name}".endswith(METADATA)]

    # --- published tensors, read back --------------------------------------------------------------------------

    def _published(self, linear: PackedLinear, proof: Proof) -> Iterable[tuple[str, Tensor]]:
        """Return the published tensors of a packed linear by name, recovered from its weights; experts are joined.

        proof: Collects bitwise comparisons of the weights with those that the recovered tensors give.
        """
        labeled = proof.of(f"{linear.names[0]}: ")
        weights, joined = self._weights[linear.names], self._joined.get(linear.names)
        if joined is not None and len(weights) == 1:
            return self._joined_tensors(joined, len(linear.names), weights[0].stored(labeled))
        stored: list[Mapping[str, Tensor]] = [weight.stored(labeled) for weight in weights]
        if len(weights) < len(linear.names):
            whole = LowBitWeight(weights[0].scheme, stored[0], weights[0].shape)
            stored = [part.tensors for part in whole.split(linear.widths)]
        named = {
            f"{module}.{suffix}": tensor
            for module, own in zip(linear.names, stored, strict=True)
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
        """Concatenate the biases of each packed linear; the biases of its modules become views of the result."""
        for linear in self._linears:
            names = [f"{name}.bias" for name in linear.names]
            if linear.biases:
                self._biases[linear.names] = torch.cat([self._values[name] for name in names])
                self._values |= zip(names, self._biases[linear.names].split(list(linear.widths)), strict=True)


def _in_own_memory(weight: LowBitWeight) -> LowBitWeight:
    """Return a copy of the weight with only the tensors that products read (`operands`)."""
    # The packed weight can be recovered from the tiled one, which has the same size.
    names = set(weight.operands) - ({"weight_packed"} if "weight_tiled" in weight.operands else set())
    operands = {name: operand.clone() for name, operand in weight.operands.items() if name in names}
    return replace(weight, tensors=operands, operands=operands)


def _joined_name(experts: PackedLinear) -> str:
    """Return the name under which `join_experts` publishes all experts of a packed linear."""
    owner = experts_of(experts.names[0].rpartition(".")[0])
    assert owner is not None and experts.experts is not None, f"{experts.names[0]} is not an expert"
    return next(name for name, members in expert_stacks(owner, experts.experts).items() if members == experts.names)
