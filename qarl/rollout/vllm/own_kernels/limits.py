"""Quantization formats that vLLM's kernels do not support or compute inexactly, and workarounds.

Importing this module does not import vLLM.
"""

from __future__ import annotations

import json
from functools import wraps
from pathlib import Path
from typing import Any


def known_limits(quantization: dict[str, Any] | None, version: str, experts: bool) -> tuple[str, str]:
    """Return what vLLM cannot do with a quantization format on this device.

    Sources: vLLM 0.24 and 0.32 (`compressed_tensors.py`, `kernels/linear`), and tests on such devices.

    Args:
        quantization: `quantization_config` of the checkpoint; None if it is not quantized.
        version: vLLM's version.
        experts: Whether experts of a mixture are among the quantized layers.

    Returns:
        (why vLLM cannot run the format, how its arithmetic differs from the format), each "" if it does not apply.
    """
    import torch
    from vllm.platforms import current_platform

    if quantization is None:
        return "", ""
    group = quantization["config_groups"]["group_0"]
    weights, activations = group["weights"], group["input_activations"]
    packed = quantization["format"] == "pack-quantized"
    if quantization["format"] == "int-quantized" and activations is None:
        return "vLLM loads int4 weights with 16-bit activations packed only", ""
    if current_platform.is_cpu():
        if experts:
            return f"vLLM {version} has no kernel for quantized experts on a CPU", ""
        current_platform.import_kernels()  # `import vllm` does not load the kernels of this CPU
        if quantization["format"] == "nvfp4-pack-quantized":
            return f"vLLM {version} has no kernel for NVFP4 weights on a CPU", ""
        if packed and not hasattr(torch.ops._C, "cpu_gemm_wna16"):
            unpacked = "" if activations is None else "; export it with --unpacked"
            return f"vLLM {version} has no kernel for packed int4 weights on this CPU: it needs AVX-512{unpacked}", ""
        if packed and activations is not None:
            return "", "its kernel for packed int4 weights leaves activations unquantized"
        if weights["type"] == "int" and weights["num_bits"] == 8:
            error = cpu_int8_error()
            return "", f"its int8 product is off by {error:.0%} on this CPU" if error > 0.01 else ""
    elif weights["num_bits"] == 4 and activations is not None and activations["type"] == "int":
        if experts:
            return f"vLLM {version} has no kernel for experts with int4 weights and int8 activations on a GPU", ""
        if weights["group_size"] != 128:
            return f"vLLM {version} has no kernel for int4 weights with int8 activations on this GPU", ""
        return "", "on this GPU it quantizes activations to FP8, although the format says int8"
    return "", ""


def cpu_int8_error() -> float:
    """Return the relative error of vLLM's int8 product on random codes: 0 with VNNI; other CPUs may saturate."""
    import torch
    from vllm import _custom_ops as ops

    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-127, 128, (8, 576), dtype=torch.int8, generator=generator)
    weight = torch.randint(-127, 128, (256, 576), dtype=torch.int8, generator=generator)
    exact = x.double() @ weight.double().t()
    found = torch.zeros(8, 256, dtype=torch.bfloat16)
    transposed, weight_scale, scale = weight.t(), torch.ones(256, 1), torch.ones(8, 1)
    handle = ops.create_onednn_scaled_mm(transposed, weight_scale, found.dtype, True, False, 1)
    ops.onednn_scaled_mm(handle, x, found, scale, None, None, None)
    # vLLM's handle stores addresses, not references, so these tensors must stay alive until here.
    del transposed, weight_scale, scale
    return float((found.double() - exact).norm() / exact.norm())


def keep_int8_scales_alive() -> None:
    """Patch vLLM so that the weight scales of its int8 product on the CPU stay alive. May be called repeatedly.

    vLLM passes the address of the scales to oneDNN. A reload of weights creates a handle from new tensors, copies their
    values into the old tensors and frees the new ones. The handle then reads freed memory, and the sampler returns
    empty text (observed with 0.32; the canary detects it).
    """
    import vllm._custom_ops as ops

    make = getattr(ops, "create_onednn_scaled_mm", None)
    if make is None or hasattr(make, "__wrapped__"):
        return

    @wraps(make)
    def keeping(weight: Any, weight_scales: Any, *rest: Any) -> Any:
        handle = make(weight, weight_scales, *rest)
        handle.weight_scales = weight_scales
        return handle

    ops.create_onednn_scaled_mm = keeping  # type: ignore[assignment]


def request_amx() -> None:
    """Ask Linux for the AMX tile registers, which vLLM's kernels use on a CPU that has them.

    vLLM itself asks only for some of its kernels. Without this it ended with an illegal instruction on a checkpoint of
    8-bit integer weights and activations (observed with 0.32).
    """
    import torch

    torch.cpu._init_amx()  # False, and no effect, without AMX


def import_model_class(checkpoint: Path) -> None:
    """Import vLLM's class of the checkpoint's model in this process.

    Otherwise vLLM starts a process to inspect the class, which imports all of vLLM again.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    for name in json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["architectures"]:
        if (known := ModelRegistry.models.get(name)) is not None and hasattr(known, "module_name"):
            ModelRegistry.register_model(name, known.load_model_cls())
