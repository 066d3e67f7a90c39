"""Reads the decoder's structure and masters from a Hugging Face model, once; its modules are not run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from qarl_kernels import pointwise
from torch import Tensor, nn
from transformers import PreTrainedConfig

from qarl.config.architecture import FAMILIES
from qarl.config.model_fields import check_implemented, check_refused, layer_windows
from qarl.errors import UserError
from qarl.policy.experts import Mixture, normalizes
from qarl.policy.layer import DecoderLayer, Norm
from qarl.policy.linear import PackedLinear
from qarl.policy.routes import ExpertLayer
from qarl.utils.expert_names import EXPERT_NAMES, ExpertNames
from qarl.utils.packed_linears import GATE_UP, QKV

HFModule: TypeAlias = Any  # Hugging Face modules, whose attributes no type checker knows

QKV_PROJ, O_PROJ = tuple(f"self_attn.{name}" for name in QKV), ("self_attn.o_proj",)
GATE_UP_PROJ, DOWN_PROJ = tuple(f"mlp.{name}" for name in GATE_UP), ("mlp.down_proj",)


def check_family(config: PreTrainedConfig) -> None:
    """Raise UserError unless the policy implements every operation of the model.

    Other families may scale or cap attention scores or logits, which qarl does not implement. config: From config.json
    or a GGUF header.
    """
    if config.model_type not in FAMILIES:
        raise UserError(
            f"model.path: model type '{config.model_type}' is not supported; use one of {', '.join(FAMILIES)}"
        )
    values = config.to_dict()
    try:
        check_refused(config.model_type, values)
        check_implemented(config.model_type, values)
    except ValueError as error:
        raise UserError(f"model.path: the configuration {error}") from None


def check_norms(model: nn.Module) -> None:
    """Compare each RMSNorm of a model with the policy's on random input. Raises UserError if they differ."""
    for name, module in model.named_modules():
        if not (type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")):
            continue
        weight = module.weight.detach()
        x = torch.randn(3, weight.shape[-1], generator=torch.Generator().manual_seed(0)).to(weight.device)
        with torch.no_grad():
            own = pointwise.rms_norm(x, None, weight, float(module.variance_epsilon))
            if not torch.allclose(module(x), own, rtol=1e-5, atol=1e-6, equal_nan=True):
                raise UserError(
                    f"model.path: {name} ({type(module).__name__}) is not a Llama-style RMSNorm; "
                    f"use a model of {', '.join(FAMILIES)}"
                )


def rotary_tables(
    rotary: HFModule, positions: int, dtypes: set[torch.dtype], device: torch.device
) -> dict[torch.dtype, tuple[Tensor, Tensor]]:
    """cos and sin (positions, D) per compute dtype, so that a position's values never depend on the batch.

    They are computed in float32 by the model's own module and rounded once.
    """
    rotary, order = rotary.to(device), torch.arange(positions, device=device)[None]
    tables = {}
    for dtype in dtypes:
        cos, sin = rotary(torch.empty(1, dtype=dtype, device=device), order)
        tables[dtype] = cos[0].contiguous(), sin[0].contiguous()
    return tables


def read_norm(module: HFModule, name: str) -> Norm:
    """Return the norm of a module. name: Name of the module."""
    return Norm(f"{name}.weight", module.weight, float(module.variance_epsilon))


def read_layers(model: HFModule, dequantize_input: bool) -> list[DecoderLayer]:
    """Return the layers of a model.

    model: The decoder of a causal LM (`base_model`), which names its parameters `model.…`. dequantize_input: See
    `PackedLinear`.
    """
    config, layers = model.config, []
    windows = layer_windows(config.model_type, vars(config))
    names, number = EXPERT_NAMES.get(config.model_type), 0
    for index, module in enumerate(model.layers):
        block = None if names is None else getattr(module, names.block, None)
        experts = None
        if names is not None and isinstance(block, Mixture):
            experts = _read_experts(config, f"model.layers.{index}", names, number)
            number += 1
        layers.append(_read_layer(config, index, module, windows[index], experts, dequantize_input))
    return layers


def _read_experts(config: PreTrainedConfig, layer: str, names: ExpertNames, number: int) -> ExpertLayer:
    router, *shared = (f"{layer}.{gate}.weight" for gate in names.gates())
    experts = config.num_experts, config.num_experts_per_tok, normalizes(config)
    return ExpertLayer(number, router, *experts, names, *shared)


def _read_layer(
    config: PreTrainedConfig,
    index: int,
    module: HFModule,
    window: int | None,
    experts: ExpertLayer | None,
    dequantize_input: bool,
) -> DecoderLayer:
    name, attention = f"model.layers.{index}", module.self_attn
    modules = dict(module.named_modules())

    def norm(leaf: str) -> Norm | None:
        return read_norm(modules[leaf], f"{name}.{leaf}") if leaf in modules else None

    def packed(leaves: tuple[str, ...], of: ExpertLayer | None = None) -> PackedLinear:
        return _packed(name, leaves, modules, None if of is None else of.count, dequantize_input)

    gate_up: tuple[str, ...] = GATE_UP_PROJ
    down: tuple[str, ...] = DOWN_PROJ
    shared: tuple[tuple[str, ...], ...] = ()
    gates = {}
    if experts is not None:
        names = experts.names
        gate_up = tuple(names.expert(i, leaf) for i in range(experts.count) for leaf in (names.gate, names.up))
        down = tuple(names.expert(i, names.down) for i in range(experts.count))
        shared = names.shared_stacks()
        gates = dict(zip(experts.gates, (modules[gate].weight for gate in names.gates()), strict=True))
    input_norm, mlp_norm = norm("input_layernorm"), norm("post_attention_layernorm")
    assert input_norm is not None and mlp_norm is not None, "every family has both norms"
    q_norm = norm("self_attn.q_norm")
    return DecoderLayer(
        index=index,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        scale=float(attention.scaling),
        window=window,
        input_norm=input_norm,
        mlp_norm=mlp_norm,
        q_norm=q_norm,
        k_norm=norm("self_attn.k_norm"),
        whole_norms=q_norm is not None and q_norm.master.numel() != attention.head_dim,
        qkv=packed(QKV_PROJ),
        o=packed(O_PROJ),
        gate_up=packed(gate_up, experts),
        down=packed(down, experts),
        shared=tuple(map(packed, shared)),
        experts=experts,
        gates=gates,
    )


def _packed(
    name: str, leaves: tuple[str, ...], modules: Mapping[str, HFModule], experts: int | None, dequantize_input: bool
) -> PackedLinear:
    linears = [modules[leaf] for leaf in leaves]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    assert len(biases) in (0, len(leaves)), f"{name}: some of {', '.join(leaves)} have a bias and some have none"
    return PackedLinear(
        tuple(f"{name}.{leaf}" for leaf in leaves),
        tuple(linear.out_features for linear in linears),
        tuple(linear.weight for linear in linears),
        tuple(biases),
        experts,
        dequantize_input,
    )
