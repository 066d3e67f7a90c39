"""`model.device` and `model.dtype` as torch has them."""

from __future__ import annotations

import torch

from qarl.errors import UserError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def pick_device(name: str, gpu: int = 0) -> torch.device:
    """The device of `auto` (CUDA where there is one), `cpu` or `cuda`. Raises UserError where there is no CUDA.

    A command picks once and hands the device to everything that it makes. gpu: which of the visible GPUs, said in the
    device itself, so that nothing depends on which one CUDA holds for the current.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("model.device: cuda asked for, but torch sees no CUDA device; use auto or cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", gpu)
