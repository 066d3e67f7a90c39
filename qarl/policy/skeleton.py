"""A model's modules without its weights: for walking its parameters, and for policies that live on a snapshot alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from qarl_formats.scheme import Scheme, check_shape, is_ignored
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from qarl.errors import UserError
from qarl.policy.experts import take_apart
from qarl.policy.foreign import foreign_errors
from qarl.policy.modules import HFModule, check_family

ATTENTION = "sdpa"  # until qarl's own takes its place; a config.json may name a kernel to download and run


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """The causal LM of `config` in eval mode, parameters on the meta device; norms and rotary tables are real.

    Raises UserError for a family that the policy does not support, and for a configuration that makes no model.
    """
    check_family(config)
    with foreign_errors("model.path: its configuration makes no model"):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=ATTENTION, trust_remote_code=False
            )
        take_apart(model)
        for name, module in list(model.named_modules()):
            owner, _, leaf = name.rpartition(".")
            if leaf == "rotary_emb":
                setattr(model.get_submodule(owner), leaf, type(module)(config=config))
            elif type(module).__name__.endswith("RMSNorm"):
                module.to_empty(device="cpu")
                nn.init.ones_(module.weight)
    check_rotary(model)
    return model.requires_grad_(False).eval()


def check_rotary(model: PreTrainedModel) -> None:
    """Raise UserError for rotary embeddings whose frequencies are no numbers, or do not turn the whole of a head."""
    head_dim = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
    for name, module in model.named_modules():
        if name.rpartition(".")[2] != "rotary_emb":
            continue
        frequencies, scale = module.inv_freq, float(getattr(module, "attention_scaling", 1.0))
        if not (frequencies.isfinite().all() and 0 < scale < 1e6) or 2 * frequencies.numel() != head_dim:
            raise UserError(
                f"model.path: the rope parameters {str(model.config.rope_parameters)[:160]} give no rotary "
                f"embedding of heads of {head_dim} features; restore config.json"
            )


def schemes_of(model: nn.Module, scheme: Scheme, ignore: list[str]) -> Callable[[str], Scheme | None]:
    """What a parameter is quantized in, by its name; None: not at all. model: a skeleton will do."""
    modules = {name for name in linear_names(model) if scheme.quantized and not is_ignored(name, ignore)}
    quantized = {f"{name}.weight" for name in modules}
    return lambda name: scheme if name in quantized else None


def check_shapes(model: nn.Module, scheme: Scheme, ignore: list[str]) -> None:
    """Raise UserError for a Linear layer that the scheme cannot quantize. model: a skeleton will do."""
    for name in linear_names(model):
        module: HFModule = model.get_submodule(name)
        if not is_ignored(name, ignore):
            try:
                check_shape(scheme, name, module.out_features, module.in_features)
            except ValueError as error:
                raise UserError(f"quant.group_size: {error}") from error


def linear_names(model: nn.Module) -> list[str]:
    """The Linear layers of a Hugging Face model that a scheme may quantize: all but the output layer."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
