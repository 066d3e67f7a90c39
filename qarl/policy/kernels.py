"""Which products a policy runs on: Triton kernels on a GPU, plain torch elsewhere or on request."""

from __future__ import annotations

import torch
from qarl_formats.scheme import Scheme

from qarl.config import QuantConfig
from qarl.errors import UserError

FP8 = (8, 9)  # compute capability


def use_kernels(quant: QuantConfig, scheme: Scheme, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether quantization, aligned products and the output layer run on Triton kernels.

    They do on CUDA with a 16-bit compute dtype, unless `quant.kernels` says `reference`. float32 has no kernels.
    Raises UserError where the GPU cannot multiply the scheme's codes.
    """
    if quant.kernels == "reference" or device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        if quant.backward == "fp8":
            raise UserError(
                "quant.backward: fp8 is for the Triton kernels of a GPU, and this learner runs in plain torch; use bf16"
            )
        return False
    capability = torch.cuda.get_device_capability(device)
    if quant.backward == "fp8" and capability < FP8:
        raise UserError(
            f"quant.backward: fp8 needs compute capability 8.9 or later, and this GPU has "
            f"{capability[0]}.{capability[1]}; use bf16"
        )
    if capability < scheme.capability:
        needed = f"{scheme.capability[0]}.{scheme.capability[1]}"
        raise UserError(
            f"quant.scheme: {scheme.name} kernels need compute capability {needed} or later, and this GPU has "
            f"{capability[0]}.{capability[1]}; use w8a8, or set quant.kernels: reference (plain torch, slow)"
        )
    return True
