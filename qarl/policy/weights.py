"""Weight sets: the tensors that one forward reads, built from the snapshot of a version.

A forward gets a `WeightSet` as an argument. A policy has up to four:

    learner    the current version, as `quant.learner` and `model.learner_dtype` say
    sampler    the published version, in the sampler's arithmetic
    shadow     the current version, in the sampler's arithmetic
    reference  a version kept from earlier, as the learner read it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from qarl_formats.rows import concatenate_rows
from qarl_formats.weight import LowBitWeight, ordinary_weight
from torch import Tensor

from qarl.errors import UserError
from qarl.policy.linear import WeightSet
from qarl.policy.parts import PolicyParts
from qarl.weight_sync.quantize import Quantizer
from qarl.weight_sync.snapshot import Snapshot

NARROW = (torch.bfloat16, torch.float16)


def learner_weights(policy: PolicyParts, snapshot: Snapshot, masters: Mapping[str, Tensor]) -> WeightSet:
    """The learner's weights of a snapshot that was just made from the masters.

    In the published dtype they share the snapshot's tensors. In another dtype they are the masters, rounded to it.

    Args:
        policy: The learner's policy.
        snapshot: The current version.
        masters: Master weights by name; not read if the learner is aligned.
    """
    if policy.aligned:
        return sampler_weights(policy, snapshot)
    rounding = Quantizer(policy.learner_dtype, snapshot.version, kernels=False)

    def rounded(name: str) -> Tensor:
        value = rounding.quantize(name, masters[name], None, None)
        assert isinstance(value, Tensor)
        return value

    if policy.learner_dtype == policy.dtype:
        values = _published_values(policy, snapshot)
    else:
        values = {name: rounded(name) for name in _unquantized(policy)}
    fused = policy.kernels and policy.learner_dtype in NARROW
    rounds = policy.quant.kv_cache_dtype == "fp8" and policy.quant.learner != "full_precision"
    weights_of = partial(_learner, policy, snapshot=snapshot, masters=masters, rounded=rounded)
    weights = _weight_set(policy, values, weights_of, fused, rounds)
    rounding.require_finite(masters, lambda _: None)  # waits for the device once
    return weights


def sampler_weights(policy: PolicyParts, snapshot: Snapshot, learner: WeightSet | None = None) -> WeightSet:
    """Return the weights of a snapshot in the sampler's arithmetic.

    Args:
        policy: The learner's policy.
        snapshot: The version to read.
        learner: The learner's weights of the same version. Unquantized values and output layer are shared with them if
            the dtypes agree.
    """
    shared = learner if policy.learner_dtype == policy.dtype else None
    values = _published_values(policy, snapshot) if shared is None else shared.values
    fp8 = policy.quant.kv_cache_dtype == "fp8"
    head = None if shared is None else shared.head
    return _weight_set(policy, values, lambda names: _published(policy, names, snapshot), policy.kernels, fp8, head)


def _weight_set(
    policy: PolicyParts,
    values: Mapping[str, Tensor],
    weights_of: Callable[[tuple[str, ...]], list[LowBitWeight]],
    fused: bool,
    kv_fp8: bool,
    head: Tensor | None = None,
) -> WeightSet:
    """Build a weight set. weights_of: Returns the weights of layers with the same input: one for all, or one each."""
    linears = {}
    for linear in policy.decoder.linears:
        # On a CPU the bits of a product depend on its shape, so plain torch multiplies each layer separately.
        groups = [linear.names] if fused else [(name,) for name in linear.names]
        weights = [weight for names in groups for weight in weights_of(names)]
        if fused and linear.experts is not None and len(weights) > 1:
            raise UserError(
                f"quant.scheme: {policy.quant.scheme} cannot hold the experts of {linear.names[0]} and its neighbours "
                f"as one weight: some are ignored (quant.ignore), or their {linear.widths[0]} output features share "
                "scales or zero points; quantize all or none, use another scheme, or set quant.kernels: reference"
            )
        biases = [values[f"{name}.bias"] for name in linear.names] if linear.biases else []
        linears[linear] = linear.parts(weights, torch.cat(biases) if biases else None)
    if head is None:
        head = values[policy.head_name]
        head = head.float() if head.device.type == "cpu" else head
    return WeightSet(linears, values, head, fused, kv_fp8)


def _published_values(policy: PolicyParts, snapshot: Snapshot) -> dict[str, Tensor]:
    return {name: snapshot.tensors[name] for name in _unquantized(policy)}


def _unquantized(policy: PolicyParts) -> list[str]:
    weights = {f"{name}.weight" for linear in policy.decoder.linears for name in linear.names}
    return [name for name, _ in policy.named_parameters() if name not in weights]


def _published(policy: PolicyParts, names: tuple[str, ...], snapshot: Snapshot) -> list[LowBitWeight]:
    """Return the sampler's weights of some layers: one for all if the snapshot packs them, else one per layer."""
    return [weight.prepare(policy.dtype, policy.kernels) for weight in snapshot.packed(names)]


def _learner(
    policy: PolicyParts,
    names: tuple[str, ...],
    snapshot: Snapshot,
    masters: Mapping[str, Tensor],
    rounded: Callable[[str], Tensor],
) -> list[LowBitWeight]:
    """Return the weights of some layers for a learner that is not aligned.

    rounded: Returns a master by name, rounded to the learner's dtype in new memory.
    """
    dtype, kernels = policy.learner_dtype, policy.kernels
    quantized = [name in snapshot.weights for name in names]
    if policy.quant.learner == "fake_quant" and any(quantized):
        if not all(quantized):  # some of them are ignored
            return [weight for name in names for weight in _learner(policy, (name,), snapshot, masters, rounded)]
        return [ordinary_weight(one.dequantize(dtype), one.scheme, kernels) for one in snapshot.packed(names)]
    own = [f"{name}.weight" for name in names]
    if dtype != policy.dtype:
        values = [rounded(name) for name in own]
    elif policy.quant.learner == "full_precision":
        values = [masters[name].detach().to(dtype, copy=True) for name in own]
    else:
        return _published(policy, names, snapshot)
    return [ordinary_weight(concatenate_rows(values), kernels=kernels)]
