"""How the processes of one vLLM, which each hold a part of its model, find each other.

vLLM's own way is that of torchrun, a TCP store. Here they meet in a file of a directory that only their user can open;
what they connect by, and listen on, is the loopback interface (`settings.ENVIRONMENT`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist

SHARED = ("psm_", "cpushm")  # in the names of what vLLM shares memory by: Python's, and that of its sums on the CPU


@contextmanager
def meeting_in(file: Path, backend: str, index: int, count: int) -> Iterator[None]:
    """While vLLM starts as process `index` of `count`. file: the same for all, new. backend: of the default group."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    os.environ["VLLM_RPC_BASE_PATH"] = str(file.parent)  # for sockets
    os.environ |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}  # NCCL needs no more
    dist.init_process_group(backend, store=dist.FileStore(str(file), count), rank=index, world_size=count)
    # (how its groups would meet if there were none yet, rank, number of its GPU among those that this process sees). On
    # the CPU vLLM names shared memory after the first, which two vLLMs of a machine must not have in common.
    found = (f"env://:{file.parent.name}", index, 0)
    ExecutorWithExternalLauncher._distributed_args = lambda self: found
    yield
    if agreed(True):  # all have opened it
        _forget_names()


def agreed(well: bool) -> bool:
    """Whether all is well in every process of the model; all of them ask."""
    from vllm.distributed.parallel_state import get_world_group

    answer = torch.tensor([well], dtype=torch.int32)
    dist.all_reduce(answer, dist.ReduceOp.MIN, group=get_world_group().cpu_group)
    return bool(answer)


def _forget_names() -> None:
    """Take the names of shared memory away, which lasts as long as its processes: they are killed at their end."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/dev/shm/")[2]
        if any(part in path for part in SHARED):
            with suppress(OSError):
                os.unlink(f"/dev/shm/{path}")
