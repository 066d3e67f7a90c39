"""What a decoder layer is made of, read once from a Hugging Face model of the Llama layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig

from qarl.config.model_fields import layer_windows
from qarl.experts import EXPERT_NAMES, ExpertNames
from qarl.fused import GATE_UP, QKV
from qarl.policy.experts import Mixture, normalizes
from qarl.policy.modules import HFModule
from qarl.policy.projection import Stack
from qarl.policy.routes import ExpertLayer

ATTENTION = (tuple(f"self_attn.{name}" for name in QKV), ("self_attn.o_proj",))
MLP = (tuple(f"mlp.{name}" for name in GATE_UP), ("mlp.down_proj",))
NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")


@dataclass(frozen=True)
class LayerModules:
    """Sizes, parameter names and masters of one layer.

    module: the layer itself, whose linears, norms and activation `qarl.policy.modules` has put in place. masters: of
    the norms, the router and the shared expert's gate, by parameter name. input_norm, mlp_norm, q_norm, k_norm: names
    of norms' weights, the last two or None. whole_norms: whether those two are over all heads at once. stacks: of q, k,
    v; o; gate, up; down, the last two of all experts where there are experts: gate and up of the first, of the second,
    ...; behind them gate, up; down of the shared expert, where there is one. experts: None where the layer has an MLP.
    window: tokens that a query sees, None: all. scale: of the scores.
    """

    index: int
    module: HFModule
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    eps: float
    input_norm: str
    mlp_norm: str
    q_norm: str | None
    k_norm: str | None
    whole_norms: bool
    masters: Mapping[str, nn.Parameter]
    stacks: tuple[Stack, ...]
    experts: ExpertLayer | None = None

    def parameters(self) -> list[nn.Parameter]:
        """All masters of the layer, the large ones first."""
        weights = [master for stack in self.stacks for master in stack.masters]
        biases = [master for stack in self.stacks for master in stack.biases]
        return [*weights, *biases, *self.masters.values()]


def read_layers(model: HFModule) -> list[LayerModules]:
    """The layers of a model without its output layer, whose parameters a causal LM knows as `model.…`."""
    config, layers = model.config, []
    windows = layer_windows(config.model_type, vars(config))
    names, number = EXPERT_NAMES.get(config.model_type), 0
    for index, module in enumerate(model.layers):
        block = None if names is None else getattr(module, names.block, None)
        experts = None
        if names is not None and isinstance(block, Mixture):
            experts = _read_experts(config, f"model.layers.{index}", names, number)
            number += 1
        layers.append(_read_layer(config, index, module, windows[index], experts))
    return layers


def _read_experts(config: PreTrainedConfig, layer: str, names: ExpertNames, number: int) -> ExpertLayer:
    router, *shared = (f"{layer}.{gate}.weight" for gate in names.gates())
    experts = config.num_experts, config.num_experts_per_tok, normalizes(config)
    return ExpertLayer(number, router, *experts, names, *shared)


def _read_layer(
    config: PreTrainedConfig, index: int, module: HFModule, window: int | None, experts: ExpertLayer | None
) -> LayerModules:
    name, attention = f"model.layers.{index}", module.self_attn
    modules = dict(module.named_modules())
    norms = {leaf: f"{name}.{leaf}.weight" for leaf in NORMS if leaf in modules}
    masters = {norm: modules[leaf].weight for leaf, norm in norms.items()}
    mlp: tuple[tuple[str, ...], ...] = MLP
    shared: tuple[tuple[str, ...], ...] = ()
    if experts is not None:
        of, count = experts.names, range(experts.count)
        mlp = (
            tuple(of.expert(i, leaf) for i in count for leaf in (of.gate, of.up)),
            tuple(of.expert(i, of.down) for i in count),
        )
        shared = of.shared_stacks()
        masters |= zip(experts.gates, (modules[gate].weight for gate in of.gates()), strict=True)
    qkv, o = (_stack(name, leaves, modules) for leaves in ATTENTION)
    gate_up, down = (_stack(name, leaves, modules, None if experts is None else experts.count) for leaves in mlp)
    q_norm = modules.get("self_attn.q_norm")
    return LayerModules(
        index=index,
        module=module,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        scale=float(attention.scaling),
        window=window,
        eps=module.input_layernorm.eps,
        input_norm=norms["input_layernorm"],
        mlp_norm=norms["post_attention_layernorm"],
        q_norm=norms.get("self_attn.q_norm"),
        k_norm=norms.get("self_attn.k_norm"),
        whole_norms=q_norm is not None and q_norm.weight.numel() != attention.head_dim,
        masters=masters,
        stacks=(qkv, o, gate_up, down, *(_stack(name, leaves, modules) for leaves in shared)),
        experts=experts,
    )


def _stack(name: str, leaves: tuple[str, ...], modules: Mapping[str, HFModule], experts: int | None = None) -> Stack:
    linears = [modules[leaf] for leaf in leaves]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    assert len(biases) in (0, len(leaves)), f"{name}: some of {', '.join(leaves)} have a bias and some have none"
    return Stack(
        tuple(f"{name}.{leaf}" for leaf in leaves),
        tuple(linear.out_features for linear in linears),
        tuple(linear.weight for linear in linears),
        tuple(biases),
        experts,
    )
