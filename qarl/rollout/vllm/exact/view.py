"""The policy's decoder over the tensors that vLLM's layers hold: no weight is there twice."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from qarl_formats.weight import LowBitWeight
from torch import Tensor, nn
from transformers import PreTrainedConfig

from qarl.policy.decoder import Decoder
from qarl.policy.linear import QuantLinear
from qarl.policy.modules import replace_modules
from qarl.policy.projection import Projection, Stack
from qarl.policy.skeleton import linear_names, skeleton
from qarl.policy.view import Role, View
from qarl.rollout.vllm.expert_kernels import HeldStack, experts_method
from qarl.rollout.vllm.held import Unit, load_units
from qarl.rollout.vllm.linear_kernels import HoldsPublished, kernel_of


def bare_decoder(config: PreTrainedConfig, positions: int, dtype: torch.dtype, device: torch.device) -> Decoder:
    """The decoder of a model without masters, whose role has no view yet.

    config: of the unquantized model. positions: tokens of the longest sequence.
    """
    model = skeleton(config)
    role = Role()
    for name in linear_names(model):
        model.set_submodule(name, QuantLinear(model.get_submodule(name), name, role, False))
    replace_modules(model, role, positions, {dtype}, device)
    return Decoder(model.base_model, role, False, "bf16")


def held_view(model: nn.Module, decoder: Decoder, dtype: torch.dtype, head: Tensor, kv_fp8: bool) -> View:
    """What the decoder reads, in the memory of a loaded vLLM model with qarl's linear kernels.

    head, kv_fp8: see `View`. dtype: of activations. Products of Triton read a fused weight at once; those in plain
    torch read its parts, in the learner's shapes.
    """
    modules = dict(model.named_modules())
    units = load_units(model)
    embedding = modules[decoder.embedding_name.removesuffix(".weight")]
    values = {decoder.embedding_name: embedding.weight.data[: embedding.org_vocab_size]}
    norms = [decoder.norm_name]  # and routers, and gates of shared experts
    operands: dict[str, LowBitWeight] = {}
    projections = {}
    for layer in decoder.layers:
        norms += [name for name in (layer.input_norm, layer.mlp_norm, layer.q_norm, layer.k_norm) if name is not None]
        norms += layer.experts.gates if layer.experts is not None else []
        for stack in layer.stacks:
            held = modules[units[stack.names[0]].name]
            parts, kernels = _operands(held, units[stack.names[0]], stack, dtype)
            bias = None if getattr(held, "bias", None) is None else held.bias.data
            if kernels:
                projections[stack.names] = Projection(stack, tuple(parts), bias)
                continue
            operands |= zip(stack.names, parts, strict=True)
            if bias is not None:
                biases = (f"{name}.bias" for name in stack.names)
                values |= zip(biases, bias.split(list(stack.widths)), strict=True)
    values |= {name: modules[name.removesuffix(".weight")].weight.data for name in norms}
    return View(operands, values, head, projections, kv_fp8)


def _operands(held: nn.Module, unit: Unit, stack: Stack, dtype: torch.dtype) -> tuple[list[LowBitWeight], bool]:
    """The weight of one layer of vLLM, whole for Triton kernels or in the stack's parts; and whether it is for them."""
    kernel: HoldsPublished | HeldStack | None
    if (method := experts_method(held)) is not None:
        kernel = method.stacks[unit.stem.removesuffix("_")]
        whole = kernel.operands(held)
    else:
        kernel = kernel_of(held)
        assert kernel is not None, f"{stack.names[0]}: qarl's kernels serve every layer"
        whole = {name: getattr(held, name).data for name in kernel.names}
    widths = [kernel.shape[0]] if kernel.kernels else list(stack.widths)
    parts = [whole] if len(widths) == 1 else kernel.scheme.parts(whole, widths)
    found = []
    for width, part in zip(widths, parts, strict=True):
        found.append(LowBitWeight(kernel.scheme, part, (width, kernel.shape[1]), part, dtype, kernel.kernels))
    return found, kernel.kernels


def addresses(view: View) -> Iterator[int]:
    """Where the view's tensors are."""
    yield view.head.data_ptr()
    for tensor in view.values.values():
        yield tensor.data_ptr()
    for projection in view.projections.values():
        if projection.bias is not None:
            yield projection.bias.data_ptr()
    for _, _, operand in view.multiplied():
        yield from (tensor.data_ptr() for tensor in operand.operands.values())
