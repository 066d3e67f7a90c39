"""DeepSpeed's start: its package, its settings, and an engine over masters that never runs a forward."""

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
    """DeepSpeed over these parameters, in `distributed.zero_stage`, with torch's fused AdamW. A collective.

    masters: whole, float32 on the device, in one order on all ranks; in stage 3 each keeps its part alone. given: the
    user's keys.
    """
    deepspeed = start_deepspeed(device, config.distributed.timeout_s)
    if given.get("dump_state") or given.get("comms_logger", {}).get("verbose"):
        _let_speak()
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
    """The DeepSpeed JSON: what qarl decides over what the user says."""
    kept = dict(given)
    zero = {
        **given.get("zero_optimization", {}),
        "stage": stage,
        "overlap_comm": False,  # a micro-batch's gradients come from here, one group after the other
        "contiguous_gradients": True,
    }
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0  # every master is cut, the smallest too
    if not logs_communication(given):
        kept.pop("comms_logger", None)  # DeepSpeed takes it for on where it is there at all
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
    """Whether the user's keys have DeepSpeed count and time its collectives."""
    return bool(given.get("comms_logger", {}).get("enabled"))


def tell_communication() -> None:
    """Print DeepSpeed's table of its collectives on the first rank's stdout. A collective."""
    import deepspeed.comm

    deepspeed.comm.log_summary()


def _let_speak() -> None:
    """Let what DeepSpeed logs, and hides by default, reach the terminal."""
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.INFO)
    for handler in logger.handlers:
        handler.setLevel(logging.INFO)


@contextmanager
def local_rank(device: torch.device) -> Iterator[None]:
    """DeepSpeed makes the GPU with the number LOCAL_RANK the current one; a launcher may show a rank its own alone."""
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(device.index or 0) if device.type == "cuda" else before or "0"
    try:
        yield
    finally:
        del os.environ["LOCAL_RANK"]
        if before is not None:
            os.environ["LOCAL_RANK"] = before


def start_deepspeed(device: torch.device, timeout_s: float) -> Any:
    """The package, on the existing process groups; its own group ends collectives after `timeout_s`."""
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # read at the first import
    import deepspeed
    import deepspeed.comm

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings(
        "ignore", r".*torch\.distributed\.\w+` is deprecated", FutureWarning
    )  # at each of its calls
    if device.type == "cpu":
        # It compiles a way through shared memory in the middle of a start, and a start that is killed meanwhile leaves
        # a lock on which every later one hangs without a word. `import deepspeed.comm.torch` would give another module.
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed(dist.get_backend(), verbose=False, dist_init_required=False)
    # DeepSpeed makes a copy of the world's group where there is none, which would wait ten minutes or more.
    groups = sys.modules["deepspeed.utils.groups"]
    if groups._WORLD_GROUP is None:
        members = list(range(dist.get_world_size()))
        groups._WORLD_GROUP = dist.new_group(members, timeout=timedelta(seconds=timeout_s))  # type: ignore[attr-defined]
    return deepspeed
