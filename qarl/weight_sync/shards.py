"""A model cut over several GPUs: which part of each published tensor is on which, and its fingerprints.

As vLLM cuts: q, k, v, gate and up by output features, o and down by input features, embedding and output layer by
words of a vocabulary padded to a multiple of 64. The rest is whole everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from qarl.errors import UserError
from qarl.weight_sync.fingerprints import Fingerprint, fingerprints

BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_COLUMNS = ("o_proj", "down_proj")
BY_WORDS = ("embed_tokens", "lm_head")
WORDS = 64  # the vocabulary is padded to a multiple of it
# Checkpoint metadata that a kernel does not read: int64 [2], the same at every version.
METADATA = (".weight_shape",)


@dataclass(frozen=True)
class Shard:
    """One of `count` GPUs that hold a model together. index: which, from 0."""

    index: int = 0
    count: int = 1


WHOLE = Shard()


def shard_of(name: str, tensor: Tensor, shard: Shard) -> Tensor:
    """A GPU's part of a published tensor, a view. name: published. tensor: the whole one.

    Scales and zero points go with their weights; a scale of all output features or of the whole weight is whole.
    Raises UserError where the tensor cannot be cut evenly.
    """
    layer = name.split(".")[-2] if "." in name else ""
    if shard.count == 1 or name.endswith(METADATA):
        return tensor
    if layer in BY_WORDS:
        each = math.ceil(tensor.shape[0] / WORDS) * WORDS // shard.count
        return tensor[shard.index * each : (shard.index + 1) * each]
    if layer in BY_ROWS and tensor.ndim and tensor.shape[0] > 1:
        return _part(name, tensor, 0, shard)
    if layer in BY_COLUMNS and tensor.ndim == 2 and tensor.shape[1] > 1:
        return _part(name, tensor, 1, shard)
    return tensor


def shard_prints(tensors: Iterable[tuple[str, Tensor]], shard: Shard) -> dict[str, Fingerprint]:
    """Fingerprints of a GPU's parts of published tensors, by name; metadata, which has none, is left out."""
    return fingerprints(
        (name, shard_of(name, tensor, shard).contiguous()) for name, tensor in tensors if not name.endswith(METADATA)
    )


def _part(name: str, tensor: Tensor, dim: int, shard: Shard) -> Tensor:
    each, rest = divmod(tensor.shape[dim], shard.count)
    if rest:
        raise UserError(
            f"rollout.vllm.tensor_parallel: '{name}', {tuple(tensor.shape)}, cannot be cut in {shard.count} along its "
            f"{tensor.shape[dim]}; use fewer GPUs, or smaller groups"
        )
    return tensor.narrow(dim, shard.index * each, each)
