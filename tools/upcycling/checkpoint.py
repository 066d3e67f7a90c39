"""A Mixtral checkpoint as Hugging Face directories have it, written a tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import MixtralConfig, PreTrainedConfig, PreTrainedModel

from qarl.storage.tensorfile import TensorFile

MOE = "model.layers.{layer}.block_sparse_moe"
KEPT = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "tie_word_embeddings",
)


def mixtral_config(parent: PreTrainedConfig, experts: int, top_k: int, dtype: torch.dtype) -> MixtralConfig:
    """config.json of the child of a Llama or Mistral model. Not changed: parent."""
    config = MixtralConfig(
        **{key: getattr(parent, key) for key in KEPT},
        sliding_window=getattr(parent, "sliding_window", None),
        num_local_experts=experts,
        num_experts_per_tok=top_k,
        architectures=["MixtralForCausalLM"],
    )
    config.dtype = dtype
    return config


def dense_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """What the child has of its parent as it is: all but the MLPs, tied parameters once."""
    for name, parameter in model.named_parameters():
        if ".mlp." not in name:
            yield name, parameter.detach()


def specs(model: PreTrainedModel, experts: int, dtype: torch.dtype) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The tensors of the child: name -> (dtype, shape)."""
    config = model.config
    wide, narrow = (config.intermediate_size, config.hidden_size), (config.hidden_size, config.intermediate_size)
    found = {name: tuple(tensor.shape) for name, tensor in dense_tensors(model)}
    for layer in range(config.num_hidden_layers):
        block = MOE.format(layer=layer)
        found[f"{block}.gate.weight"] = (experts, config.hidden_size)
        for expert in range(experts):
            for matrix, shape in (("w1", wide), ("w2", narrow), ("w3", wide)):
                found[f"{block}.experts.{expert}.{matrix}.weight"] = shape
    return {name: (dtype, shape) for name, shape in found.items()}


class Child(TensorFile):
    """model.safetensors of the child in `directory`, as a context manager. dtype: of every tensor in it."""

    def __init__(self, directory: Path, model: PreTrainedModel, experts: int, dtype: torch.dtype) -> None:
        super().__init__(directory / "model.safetensors", specs(model, experts, dtype), {"format": "pt"})
        self.dtype = dtype

    def put(self, name: str, tensor: Tensor) -> None:
        """Write one tensor of any dtype."""
        self.write(name, tensor.to(self.dtype))
