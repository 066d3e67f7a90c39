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
    narrow = dtype in (torch.bfloat16, torch.float16)
    kernels = quant.kernels != "reference" and device.type == "cuda" and narrow
    if quant.backward == "fp8":
        require_fp8_products("quant.backward: fp8", device if kernels else None, "use bf16")
    if kernels:
        otherwise = "use w8a8, or set quant.kernels: reference (plain torch, slow)"
        _require(f"quant.scheme: {scheme.name}", scheme.capability, device, otherwise)
        if quant.kv_cache_dtype == "fp8":
            _require("quant.kv_cache_dtype: fp8", FP8, device, "use auto")
    return kernels


def require_fp8_products(what: str, gpu: torch.device | None, otherwise: str) -> None:
    """Raise UserError where gradients cannot be products of FP8 operands.

    what: the configuration's key, and what it asks for. gpu: the learner's, None where it runs in plain torch.
    otherwise: what to set instead.
    """
    if gpu is None:
        raise UserError(f"{what} is for the Triton kernels of a GPU, and this learner runs in plain torch; {otherwise}")
    _require(what, FP8, gpu, otherwise)


def _require(what: str, needed: tuple[int, int], gpu: torch.device, otherwise: str) -> None:
    found = torch.cuda.get_device_capability(gpu)
    if found < needed:
        least, has = (".".join(map(str, version)) for version in (needed, found))
        raise UserError(f"{what} needs compute capability {least} or later, and this GPU has {has}; {otherwise}")
