"""The quantization error of every Linear layer."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from qarl.inference.masters import Masters
from qarl.weight_sync.snapshot import Snapshot


def weight_errors(masters: Masters, snapshot: Snapshot) -> Iterator[dict[str, Any]]:
    """Yield the error of each Linear layer except the output layer, in model order, one master in memory at a time.

    Compares with the tensors in `snapshot`, which the forward uses: codes times stored scales in float32, or the values
    of an unquantized layer in the compute dtype. Yields rows of `error_of`, with `module`, `layer` (index of the block,
    None outside of them) and `kind` (`q_proj`, ...).
    """
    for name in masters.shapes:
        module = name.removesuffix(".weight")
        if module not in masters.linears or not name.endswith(".weight"):
            continue
        weight = snapshot.weight(module)
        master = masters.read(name).to(weight.device)
        held = weight.dequantize(torch.float32)
        parts = module.split(".")
        layer = next((int(part) for part in parts if part.isdigit()), None)
        yield {"module": module, "layer": layer, "kind": parts[-1], **error_of(master, held)}


def error_of(weight: Tensor, held: Tensor) -> dict[str, float | None]:
    """Return the errors of `held` against `weight`, of the same shape, in float64.

    Returns:
        relative: ||W - H|| / ||W|| (Frobenius norm; None for a zero matrix). sqnr_db: 20 log10(||W|| / ||W - H||), None
        if equal. max_abs: largest |W - H|.
    """
    wide = weight.double()
    difference = wide - held.double()
    size, lost = wide.norm().item(), difference.norm().item()
    return {
        "relative": lost / size if size else None,
        "sqnr_db": 20 * math.log10(size / lost) if size and lost else None,
        "max_abs": difference.abs().max().item(),
    }
