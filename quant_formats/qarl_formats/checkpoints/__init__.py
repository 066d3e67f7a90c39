"""Formats of quantized checkpoints, one file each: the tensors that store a Linear layer, and their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qarl_formats.checkpoints.awq import AWQ
from qarl_formats.checkpoints.base import CheckpointFormat, shown
from qarl_formats.checkpoints.compressed_tensors import CompressedTensors
from qarl_formats.checkpoints.fine_grained_fp8 import FineGrainedFP8
from qarl_formats.checkpoints.gptq import GPTQ
from qarl_formats.checkpoints.mxfp4 import MXFP4

__all__ = ["CheckpointFormat", "CompressedTensors", "checkpoint_format"]

_FORMATS: dict[str, type[CheckpointFormat]] = {
    kind.method: kind for kind in (CompressedTensors, FineGrainedFP8, AWQ, GPTQ, MXFP4)
}


def checkpoint_format(config: Mapping[str, Any]) -> CheckpointFormat:
    """Return the format of a checkpoint from the `quantization_config` of its config.json.

    Raises:
        ValueError: The method is unknown, or a setting of it cannot be read. One line, without the file.
    """
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in _FORMATS:
        raise ValueError(f"quant_method {shown(method)} cannot be read; only {', '.join(_FORMATS)} can")
    return _FORMATS[method](config)
