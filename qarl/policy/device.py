"""Resolves `model.device` and `model.dtype`, and decides which algorithms of torch and which kernels run."""

from __future__ import annotations

import torch
from qarl_formats.scheme import Scheme

from qarl.config import QuantConfig
from qarl.distributed.rank_info import rank_info
from qarl.errors import UserError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FP8 = (8, 9)  # compute capability


def pick_device(name: str, gpu: int = 0) -> torch.device:
    """Resolve `auto` (CUDA if available), `cpu` or `cuda`. Raises UserError if CUDA is requested and missing.

    Call it once per command. The device has the index `gpu`, so that nothing depends on CUDA's current device.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("model.device: cuda requested, but torch sees no CUDA device; use auto or cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", gpu)


def rank_device(name: str) -> torch.device:
    """Return this process's device for `model.device`: the GPU with index LOCAL_RANK if there are several ranks.

    Raises UserError if there is no such GPU.
    """
    own = rank_info()
    device = pick_device(name, own.local if own is not None else 0)
    if own is None or device.type == "cpu":
        return device
    gpus = torch.cuda.device_count()
    if gpus == 1:  # the launcher sets CUDA_VISIBLE_DEVICES per rank
        return torch.device("cuda", 0)
    if own.local >= gpus:
        raise UserError(f"LOCAL_RANK: {own.local}, but torch sees only {gpus} GPUs; start at most one rank per GPU")
    return device


def select_algorithms(deterministic: bool) -> None:
    """Select torch's deterministic algorithms, where it has them, or its fastest ones."""
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    # Filling every new tensor with NaN costs a pass over it; nothing here reads memory it did not write.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def use_kernels(quant: QuantConfig, scheme: Scheme, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether quantization, aligned products and the output layer run on Triton kernels.

    They do on CUDA with a 16-bit compute dtype, unless `quant.kernels` is `reference`. float32 has no kernels.

    Raises:
        UserError: The GPU cannot multiply the scheme's codes.
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
    """Raise UserError unless the backward can multiply FP8 operands.

    what: The configuration key and its value. gpu: The learner's GPU; None if it runs in plain torch. otherwise: The
    fix, for the message.
    """
    if gpu is None:
        raise UserError(f"{what} needs Triton kernels on a GPU, but this learner runs in plain torch; {otherwise}")
    _require(what, FP8, gpu, otherwise)


def _require(what: str, needed: tuple[int, int], gpu: torch.device, otherwise: str) -> None:
    found = torch.cuda.get_device_capability(gpu)
    if found < needed:
        least, has = (".".join(map(str, version)) for version in (needed, found))
        raise UserError(f"{what} needs compute capability {least} or later, and this GPU has {has}; {otherwise}")
