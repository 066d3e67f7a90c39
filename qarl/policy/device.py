"""`model.device` and `model.dtype` as torch has them."""

from __future__ import annotations

import torch

from qarl.errors import UserError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def pick_device(name: str) -> torch.device:
    """The device of `auto` (CUDA where there is one), `cpu` or `cuda`. Raises UserError where there is no CUDA."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("model.device: cuda asked for, but torch sees no CUDA device; use auto or cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
