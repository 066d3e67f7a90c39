"""Check whether a run fits into this machine's host memory. Imports no torch."""

from pathlib import Path

from qarl.config import Config
from qarl.config.architecture import Architecture
from qarl.memory.activations import Device
from qarl.memory.estimate import kept_items
from qarl.memory.tensors import float32_bytes, saved_bytes, version_bytes
from qarl.utils.machine import machine_bytes


def certain_bytes(config: Config, architecture: Architecture, device: Device, ranks: int = 1) -> int:
    """Lower bound of the host memory that a run needs, in bytes.

    For training on a CPU: master weights, gradients and optimizer state. On a GPU: the larger of the master weights,
    which are read into host memory first, and of the offloaded state plus earlier versions of asynchronous rollouts.

    Args:
        config: Configuration of the run.
        architecture: The model.
        device: Where the learner computes.
        ranks: Ranks on this machine. With engine rows they share one copy of the master weights; with DeepSpeed each
            reads its own.
    """
    copies = ranks if config.distributed.engine == "deepspeed" else 1
    masters = copies * float32_bytes(architecture.parameters)
    if device == "cuda":
        kept = sum(item.bytes for item in kept_items(config, version_bytes(config, architecture), 0, device)[1:])
        return max(masters, _offloaded(config, architecture) + ranks * kept)
    return masters + saved_bytes(config, architecture)


def _offloaded(config: Config, architecture: Architecture) -> int:
    """Return the bytes of master weights and optimizer state that `optim.offload` keeps in host memory."""
    on_gpu = float32_bytes(architecture.parameters) if config.optim.offload == "moments" else 0
    return saved_bytes(config, architecture) - on_gpu if config.optim.offload else 0


def too_large(config: Config, architecture: Architecture, device: Device, ranks: int = 1) -> str | None:
    """Return an error message if a run cannot fit into this machine's memory, else None.

    GPU memory is not checked, because only the driver knows it. For the arguments see `certain_bytes`.
    """
    certain, available = certain_bytes(config, architecture, device, ranks), machine_bytes()
    if certain <= available:
        return None
    ahead = config.rollout.asynchronous
    if device == "cpu":
        what = "masters, gradients and optimizer state"
    elif ahead is not None and ahead.kept_versions == "host":
        what = "the masters, or what optim.offload and rollout.async.kept_versions keep in host memory,"
    elif config.optim.offload:
        kept = "masters and moments" if config.optim.offload == "all" else "moments"
        what = f"the {kept} that optim.offload keeps in host memory"
    else:
        each = f" of each of {ranks} ranks" if ranks > 1 and config.distributed.engine == "deepspeed" else ""
        what = f"masters{each}, which are read into host memory first,"
    return (
        f"model.path: '{config.model.path}': {what} need {certain / 2**30:,.1f} GiB, but this machine has "
        f"{available / 2**30:,.1f} GiB of memory and swap; use a smaller model or a larger machine"
    )


def expected_device(config: Config) -> Device:
    """Return the device that the run will use. Without torch, `auto` means cuda if an NVIDIA driver is loaded."""
    if config.model.device == "auto":
        return "cuda" if Path("/proc/driver/nvidia/version").exists() else "cpu"
    return config.model.device
