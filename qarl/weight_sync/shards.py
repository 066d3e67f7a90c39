"""Tensor parallelism: which part of each published tensor a GPU holds, and the fingerprints of the parts.

vLLM splits q, k, v, gate and up by output features, o and down by input features, and embedding and output layer by
words of a vocabulary padded to a multiple of 64. Everything else is replicated.
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
WORDS = 64  # the vocabulary is padded to a multiple of this
METADATA = (".weight_shape",)  # int64 (2,): no kernel reads it, and it never changes


@dataclass(frozen=True)
class Shard:
    """GPU `index` (from 0) of the `count` GPUs that hold a model."""

    index: int = 0
    count: int = 1


WHOLE = Shard()


def shard_of(name: str, tensor: Tensor, shard: Shard) -> Tensor:
    """Return a GPU's part of a published tensor, as a view.

    Scales and zero points are split with their weights. A scale for all output features or for the whole weight is
    replicated. Raises UserError if the tensor cannot be split evenly.
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
    """Return fingerprints of a GPU's parts of published tensors, by name, without those of metadata."""
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
