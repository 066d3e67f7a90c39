"""Compare version 0 of a run that starts from a quantized checkpoint with that checkpoint."""

from __future__ import annotations

from collections import Counter

from qarl_formats.scheme import CHANNEL, Scheme
from qarl_formats.weight import LowBitWeight, groups_changed
from torch import Tensor

from qarl.config import Config
from qarl.policy.load import model_weights
from qarl.policy.stored_weights import StoredWeights
from qarl.weight_sync.snapshot import Snapshot


def compare_start(config: Config, snapshot: Snapshot) -> str | None:
    """Compare the codes and scales of version 0 bit by bit with those of `model.path`, which is read again.

    It would not be enough to count the groups without a preimage: a global scale (NVFP4) depends on all weights under
    it together.

    Args:
        config: Configuration of the run.
        snapshot: Its version 0.

    Returns:
        One line for the console; None if the model is not quantized, or `quant.init` calibrates other codes.

    Raises:
        UserError: The checkpoint cannot be read.
    """
    if config.model.trust_remote_code or config.quant.init != "rtn":
        return None
    weights = model_weights(config.model, config.quant)
    if weights is None or weights.format is None:
        return None
    counts: Counter[str] = Counter()
    for module in weights.quantized:
        counts.update(_compared(weights, snapshot, module))
    first = weights.stored(f"{next(iter(weights.quantized))}.weight") if weights.quantized else None
    return _line(weights.format.method, counts, first)


def _compared(weights: StoredWeights, snapshot: Snapshot, module: str) -> dict[str, int]:
    """Count the groups of a module, and those whose codes or scales changed.

    If the run stores the module's weight in another format than the checkpoint, count it as dequantized instead.
    """
    stored, now = weights.stored(f"{module}.weight"), snapshot.weight(module)
    if isinstance(stored, Tensor) or not now.scheme.stores_like(stored.scheme, stored.shape):
        return {"dequantized": 1}
    current = LowBitWeight(now.scheme, {name: tensor.cpu() for name, tensor in now.tensors.items()}, now.shape)
    changed, groups = groups_changed(stored, current)
    return {"layers": 1, "changed": changed, "groups": groups}


def _line(method: str, counts: Counter[str], first: LowBitWeight | Tensor | None) -> str:
    """Format the comparison as one line.

    Args:
        method: Quantization method of the checkpoint.
        counts: Sums of `_compared` over the modules.
        first: First quantized weight of the checkpoint.
    """
    if not counts["layers"]:
        fix = f"; to start from its codes, set {_keys(first.scheme)}" if isinstance(first, LowBitWeight) else ""
        return f"the model is quantized ({method}); master weights are its dequantized values{fix}"
    text = f"version 0 has the codes and scales of the quantized checkpoint ({method}, {counts['layers']:,} layers)"
    if counts["changed"]:
        share = 100 * counts["changed"] / counts["groups"]
        text += f", except for {counts['changed']:,} of {counts['groups']:,} groups ({share:.2g} %) without a preimage"
    if counts["dequantized"]:
        text += f"; {counts['dequantized']:,} other layers start from dequantized values"
    return text


def _keys(scheme: Scheme) -> str:
    """Return the `quant` section that selects `scheme`, as YAML."""
    keys = [f"scheme: {scheme.name}"]
    keys += [f"group_size: {scheme.group_size or CHANNEL}"] if scheme.group_sizes else []
    keys += [] if scheme.symmetric else ["symmetric: false"]
    keys += [f"scale_dtype: {scheme.scale_dtype}"] if scheme.scale_dtypes else []
    return f"quant: {{{', '.join(keys)}}}"
