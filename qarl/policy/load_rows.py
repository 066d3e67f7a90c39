"""Load the rows of a model's weights that one rank holds, without the whole model in memory if its files allow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from qarl.config import ModelConfig, QuantConfig
from qarl.distributed.ranks import Ranks
from qarl.distributed.rows import RowPlan
from qarl.inputs.library_errors import foreign_errors
from qarl.inputs.tensors import StoredTensor
from qarl.policy.load import load_model, model_weights
from qarl.policy.source import locate
from qarl.policy.stored_weights import StoredWeights

T = TypeVar("T")


def load_rows(config: ModelConfig, plan: RowPlan, ranks: Ranks, quant: QuantConfig | None = None) -> dict[str, Tensor]:
    """Load this rank's rows of every master: float32, on the CPU, with the values of `load_model`. A collective.

    Safetensors files and converted GGUF files are read row by row. From a quantized checkpoint each rank reads one
    weight at a time, and dequantizes its own rows. A GGUF file that cannot be converted and a model with its own code
    are loaded whole, by one rank after the other. Raises UserError as `load_model` does.
    """
    weights = row_weights(config, ranks, quant)
    if weights is None:
        return in_turn(ranks, lambda: _rows_of_model(config, plan, ranks.rank))
    if weights.format is None:
        return _rows_of_files(weights.files, plan, ranks.rank)
    return {name: weights.read(name, plan.cut(name)[ranks.rank]) for name in plan.shapes}


def row_weights(config: ModelConfig, ranks: Ranks, quant: QuantConfig | None) -> StoredWeights | None:
    """Return the weights if tensors can be read one by one; None if the whole model must be loaded.

    A collective for GGUF models: the first rank converts the file.
    """
    if config.trust_remote_code:
        return None
    if locate(config).gguf_file is not None:
        return in_turn(ranks, lambda: model_weights(config))
    return model_weights(config, quant)


def in_turn(ranks: Ranks, work: Callable[[], T]) -> T:
    """Call `work` on one rank after the other. A collective; an error of one rank is raised on all."""
    found: list[T] = []
    fault: Exception | None = None
    for rank in range(ranks.count):
        if rank == ranks.rank:
            try:
                found.append(work())
            except Exception as error:  # raised below: the other ranks wait at the barrier
                fault = error
        ranks.barrier()
    ranks.all_agree(fault)
    return found[0]


def _rows_of_model(config: ModelConfig, plan: RowPlan, rank: int) -> dict[str, Tensor]:
    named = dict(load_model(config).named_parameters())
    return {name: named[name].detach()[_slice(plan.cut(name)[rank])].clone() for name in plan.shapes}


def _rows_of_files(files: dict[str, StoredTensor], plan: RowPlan, rank: int) -> dict[str, Tensor]:
    # safetensors rejects an empty range
    rows = {name: torch.empty(0, *shape[1:]) for name, shape in plan.shapes.items()}
    for file in sorted({files[name].file for name in rows}):
        with foreign_errors(f"{file}: cannot be read"), safe_open(file, framework="pt") as opened:
            for name in rows:
                if files[name].file == file and (own := plan.cut(name)[rank]):
                    rows[name] = opened.get_slice(name)[_slice(own)].float()
    return rows


def _slice(rows: range) -> slice:
    return slice(rows.start, rows.stop)
