"""A model's modules without its weights: for walking its parameters, and for policies that live on a snapshot alone."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from qarl.policy.modules import check_family


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """The causal LM of `config` in eval mode, parameters on the meta device; norms and rotary tables are real.

    Raises UserError for a family that the policy does not support.
    """
    check_family(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, module in list(model.named_modules()):
        owner, _, leaf = name.rpartition(".")
        if leaf == "rotary_emb":
            setattr(model.get_submodule(owner), leaf, type(module)(config=config))
        elif type(module).__name__.endswith("RMSNorm"):
            module.to_empty(device="cpu")
            nn.init.ones_(module.weight)
    return model.requires_grad_(False).eval()


def linear_names(model: nn.Module) -> list[str]:
    """The Linear layers of a Hugging Face model that a scheme may quantize: all but the output layer."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
