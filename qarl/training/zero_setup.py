"""Start DeepSpeed: import it, configure it, and create an engine over the master weights that never runs a forward."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from qarl.config import Config
from qarl.training.optim import adamw
from qarl.training.zero_stages import AllReduce, Partitioned, Sharded, Stage


def open_stage(
    masters: Mapping[str, nn.Parameter], config: Config, given: Mapping[str, Any], device: torch.device
) -> Stage:
    """Start DeepSpeed with torch's fused AdamW in `distributed.zero_stage`. A collective.

    Args:
        masters: Full master weights, float32 on the device, in the same order on all ranks. In stage 3 each rank keeps
            only its shard.
        config: Configuration of the run.
        given: DeepSpeed keys of the user's `distributed.config`.
        device: Device of this rank.
    """
    deepspeed = start_deepspeed(device, config.distributed.timeout_s)
    if given.get("dump_state") or given.get("comms_logger", {}).get("verbose"):
        _show_logs()
    stage = 3 if config.distributed.zero_stage is None else config.distributed.zero_stage
    module = nn.Module()
    for index, parameter in enumerate(masters.values()):
        module.register_parameter(f"master{index}", parameter)
    optimizer, _ = adamw(list(masters.items()), config.optim.lr, config.optim)
    settings = _settings(given, stage)
    with local_rank(device):
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings, dist_init_required=False)
    if stage == 0:
        return AllReduce(masters, engine, optimizer)
    if stage == 3:
        return Sharded(masters, engine, optimizer)
    return Partitioned(masters, engine, optimizer, each_round=stage == 2)


def _settings(given: Mapping[str, Any], stage: int) -> dict[str, Any]:
    """Return the DeepSpeed configuration: the user's keys, overridden by what qarl requires."""
    kept = dict(given)
    zero = {
        **given.get("zero_optimization", {}),
        "stage": stage,
        "overlap_comm": False,  # qarl feeds gradients group by group, outside of DeepSpeed's backward
        "contiguous_gradients": True,
    }
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0  # shard every master weight, even the smallest
    if not logs_communication(given):
        kept.pop("comms_logger", None)  # DeepSpeed enables the logger if the key is present
    return {
        "steps_per_print": 10**9,
        **kept,
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
    }


def logs_communication(given: Mapping[str, Any]) -> bool:
    """Return whether the user's keys enable DeepSpeed's communication log."""
    return bool(given.get("comms_logger", {}).get("enabled"))


def log_communication() -> None:
    """Print DeepSpeed's table of collectives on the first rank's stdout. A collective."""
    import deepspeed.comm

    deepspeed.comm.log_summary()


def _show_logs() -> None:
    """Show DeepSpeed's log messages, which are hidden by default, in the terminal."""
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.INFO)
    for handler in logger.handlers:
        handler.setLevel(logging.INFO)


@contextmanager
def local_rank(device: torch.device) -> Iterator[None]:
    """Set LOCAL_RANK to the index of `device` while DeepSpeed starts.

    DeepSpeed selects the GPU with the number LOCAL_RANK, which is wrong if the launcher shows each rank only its own
    GPU.
    """
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(device.index or 0) if device.type == "cuda" else before or "0"
    try:
        yield
    finally:
        del os.environ["LOCAL_RANK"]
        if before is not None:
            os.environ["LOCAL_RANK"] = before


def start_deepspeed(device: torch.device, timeout_s: float) -> Any:
    """Import DeepSpeed on top of the existing process groups.

    Args:
        device: Device of this rank.
        timeout_s: Timeout of collectives in DeepSpeed's own process group, in seconds.

    Returns:
        The deepspeed package.
    """
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported
    import deepspeed
    import deepspeed.comm

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings(
        "ignore", r".*torch\.distributed\.\w+` is deprecated", FutureWarning
    )  # raised by each of its calls
    if device.type == "cpu":
        # DeepSpeed would compile a shared-memory op here. A process killed meanwhile leaves a lock on which every later
        # start hangs silently. `import deepspeed.comm.torch` would return a different module.
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed(dist.get_backend(), verbose=False, dist_init_required=False)
    # Otherwise DeepSpeed creates its own world group, with a timeout of ten minutes or more.
    groups = sys.modules["deepspeed.utils.groups"]
    if groups._WORLD_GROUP is None:
        members = list(range(dist.get_world_size()))
        groups._WORLD_GROUP = dist.new_group(members, timeout=timedelta(seconds=timeout_s))  # type: ignore[attr-defined]
    return deepspeed
