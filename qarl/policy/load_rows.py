"""One rank's rows of a model's weights: no rank holds all of them where the files can be read in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from qarl.config import ModelConfig
from qarl.distributed.ranks import Ranks
from qarl.distributed.rows import RowPlan
from qarl.inputs.tensors import StoredTensor
from qarl.policy.foreign import foreign_errors
from qarl.policy.load import load_model, model_weights
from qarl.policy.load_config import locate

T = TypeVar("T")


def load_rows(config: ModelConfig, plan: RowPlan, ranks: Ranks) -> dict[str, Tensor]:
    """This rank's rows of every master by name, as `plan` cuts them: float32, on the CPU, what `load_model` gives.

    Safetensors files are read row by row, a GGUF file's too once it is converted. Where the conversion cannot be kept,
    and of a model with code of its own, one rank after the other loads the whole. Raises UserError as `load_model`.
    """
    files = row_files(config, ranks)
    if files is None:
        return in_turn(ranks, lambda: _of_whole_model(config, plan, ranks.rank))
    return _of_files(files, plan, ranks.rank)


def row_files(config: ModelConfig, ranks: Ranks) -> dict[str, StoredTensor] | None:
    """The safetensors files from which a rank can read single tensors; None if it has to load the whole model.

    A collective for GGUF models: the first rank converts the file.
    """
    if config.trust_remote_code:
        return None
    if locate(config).gguf_file is not None:
        return in_turn(ranks, lambda: model_weights(config))
    return model_weights(config)


def in_turn(ranks: Ranks, work: Callable[[], T]) -> T:
    """What `work` returns, which one rank after the other does."""
    found: list[T] = []
    fault: Exception | None = None
    for rank in range(ranks.count):
        if rank == ranks.rank:
            try:
                found.append(work())
            except Exception as error:  # the others would wait for this rank's turn to end
                fault = error
        ranks.barrier()
    ranks.agree(fault)
    return found[0]


def _of_whole_model(config: ModelConfig, plan: RowPlan, rank: int) -> dict[str, Tensor]:
    named = dict(load_model(config).named_parameters())
    return {name: _rows(named[name].detach(), plan.cut(name)[rank]).clone() for name in plan.shapes}


def _of_files(files: dict[str, StoredTensor], plan: RowPlan, rank: int) -> dict[str, Tensor]:
    rows: dict[str, Tensor] = {}
    for file in sorted({files[name].file for name in plan.shapes}):
        with foreign_errors(f"{file}: cannot be read"), safe_open(file, framework="pt") as opened:
            for name in plan.shapes:
                if files[name].file == file:
                    own = plan.cut(name)[rank]
                    # An empty range is none of the library's.
                    rows[name] = (
                        _rows(opened.get_slice(name), own).float()
                        if own
                        else torch.empty(0, *plan.shapes[name][1:], dtype=torch.float32)
                    )
    return {name: rows[name] for name in plan.shapes}


def _rows(tensor: Tensor, rows: range) -> Tensor:
    return tensor[rows.start : rows.stop]
