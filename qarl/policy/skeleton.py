"""Models without weights (meta device), and placeholder parameters whose values are stored elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from qarl_formats.scheme import Scheme, check_shape, is_ignored
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from qarl.errors import UserError
from qarl.inputs.library_errors import foreign_errors
from qarl.policy.experts import take_apart
from qarl.policy.modules import HFModule, check_family

ATTENTION = "sdpa"  # never runs, as qarl has its own; config.json might name a kernel for transformers to download


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """Build the causal LM of `config` in eval mode with meta parameters; norms and rotary tables are real.

    Raises UserError for an unsupported family, or if the configuration is invalid.
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
    """Raise UserError if rotary frequencies are not finite or do not rotate whole heads."""
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


def linear_names(model: nn.Module) -> list[str]:
    """The Linear layers that a scheme may quantize: all except the output layer."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]


def schemes_of(model: nn.Module, scheme: Scheme, ignore: list[str]) -> Callable[[str], Scheme | None]:
    """Return a function from a parameter's name to its scheme, None if it is not quantized."""
    modules = {name for name in linear_names(model) if scheme.quantized and not is_ignored(name, ignore)}
    quantized = {f"{name}.weight" for name in modules}
    return lambda name: scheme if name in quantized else None


def check_shapes(model: nn.Module, scheme: Scheme, ignore: list[str]) -> None:
    """Raise UserError for a Linear layer that the scheme cannot quantize."""
    for name in linear_names(model):
        module: HFModule = model.get_submodule(name)
        if not is_ignored(name, ignore):
            try:
                check_shape(scheme, name, module.out_features, module.in_features)
            except ValueError as error:
                raise UserError(f"quant.group_size: {error}") from error


def placeholder(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return a float32 tensor of full shape over one element of memory. It is NaN, so that accidental reads show.

    A policy whose masters are stored elsewhere has placeholders as parameters. Its forward reads quantized weights
    only, and autograd needs only the shape. A meta tensor would not work: its gradient would be on the meta device.
    """
    return torch.full((1,), math.nan, device=device).expand(tuple(shape))


def drop_values(masters: Iterable[nn.Parameter], device: torch.device) -> None:
    """Turn parameters into placeholders that take gradients."""
    for master in masters:
        master.data = placeholder(master.shape, device)
        master.requires_grad_(True)


def replace_meta(model: nn.Module, device: torch.device) -> None:
    """Replace the meta parameters of a skeleton with placeholders. Tied parameters stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}  # a tensor hashes by identity
    for module in model.modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                if parameter not in made:
                    made[parameter] = nn.Parameter(placeholder(parameter.shape, device))
                setattr(module, leaf, made[parameter])
