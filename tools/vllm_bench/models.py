"""Models of random weights, as policies that live on their published tensors alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import torch
from qarl_formats.registry import grouped_names
from qarl_formats.scheme import is_ignored
from torch import Tensor
from transformers import PreTrainedConfig

from qarl.config import QuantConfig
from qarl.config.quant import scheme_of
from qarl.policy.device import use_kernels
from qarl.policy.policy import Policy
from qarl.policy.skeleton import linear_names, skeleton
from qarl.weight_sync.quantize import quantize_parameter
from qarl.weight_sync.snapshot import Snapshot, build_snapshot

STD = 0.02  # of weights
DTYPE = torch.bfloat16
Masters = Callable[[str, tuple[int, ...]], Tensor]


def quant_of(scheme: str, group_size: int, kv_cache_dtype: str = "auto") -> QuantConfig:
    """The quantization section. group_size: for schemes that have groups."""
    values = {"scheme": scheme, "kv_cache_dtype": kv_cache_dtype}
    return QuantConfig.model_validate(values | ({"group_size": group_size} if scheme in grouped_names() else {}))


def random_masters(seed: int, device: torch.device) -> Masters:
    """Float32 values of a parameter by name and shape: normal, norms one; the same whenever they are asked for."""

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.full(shape, 0.0 if name.endswith("bias") else 1.0, device=device)
        return torch.randn(shape, generator=_generator(f"{seed}/{name}", device), device=device).mul_(STD)

    return read


def stepped(masters: Masters, lr: float, seed: int, device: torch.device) -> Masters:
    """The masters after AdamW's first step on a random gradient: each moves by `lr` up or down."""

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        move = torch.rand(shape, generator=_generator(f"step/{seed}/{name}", device), device=device)
        return masters(name, shape).add_(move.sub_(0.5).sign_().mul_(lr))

    return read


def _generator(text: str, device: torch.device) -> torch.Generator:
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
    return torch.Generator(device).manual_seed(seed)


def policy_of(
    config: PreTrainedConfig, quant: QuantConfig, masters: Masters, version: int, device: torch.device, context: int
) -> Policy:
    """A policy for inference. One master at a time is in memory. context: tokens."""
    scheme = scheme_of(quant)
    model = skeleton(config)
    linears = set(linear_names(model))
    kernels = use_kernels(quant, scheme, DTYPE, device)
    forms = []
    for name, parameter in model.named_parameters():
        module = name.removesuffix(".weight")
        low_bit = scheme.quantized and module in linears and not is_ignored(module, quant.ignore)
        master = masters(name, tuple(parameter.shape))
        forms.append((name, quantize_parameter(name, master, scheme if low_bit else None, DTYPE, version, kernels)))
        del master
    return Policy(model, scheme, quant, DTYPE, device, context, build_snapshot(version, forms))


def as_new_version(policy: Policy, version: int) -> Snapshot:
    """The policy's tensors as another version, whose fingerprints nobody knows yet."""
    policy.current = replace(policy.current, version=version)
    policy.sampler.offer(policy.current, lambda: policy.weights)  # of an aligned learner, it is the sampler's
    return policy.current
