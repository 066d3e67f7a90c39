"""Tensor parallel vLLM: several processes, each with a part of the model on its own GPU.

Each process is a complete vLLM engine that gets the same requests. The processes communicate in the model's
all-reduces. If one fails, the others wait in an all-reduce forever, so all of them are killed.

vLLM splits q, k, v, gate and up along output features, o and down along input features, and embedding and output layer
along a vocabulary that is padded to a multiple of 64. Everything else is replicated.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qarl.errors import UserError
from qarl.rollout.engine import Progress
from qarl.rollout.vllm.process import TICK_S, Sampler, SamplerProcess
from qarl.rollout.vllm.settings import SamplerSettings
from qarl.weight_sync.fingerprints import METADATA, Fingerprint, PublishError, fingerprints
from qarl.weight_sync.sender import SamplerFault
from qarl.weight_sync.update import WeightUpdate

BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_COLUMNS = ("o_proj", "down_proj")
BY_VOCABULARY = ("embed_tokens", "lm_head")
VOCABULARY_MULTIPLE = 64  # vLLM pads the vocabulary to a multiple of this


class TensorParallelSampler(Sampler):
    """Several processes as one sampler; see `SamplerProcess`.

    Args:
        learner: The learner's device.
        gpus: CUDA index of each process's GPU, in the order of tensor parallel ranks.
        log: Log of the first process. The logs of the others have the rank before the suffix (`sampler.1.log`).
        timeout_s: See `SamplerProcess`.

    Attributes:
        members: The processes.
    """

    def __init__(self, learner: torch.device, gpus: Sequence[int | None], log: Path, timeout_s: float) -> None:
        self._operation = "start"
        self._folder = Path(tempfile.mkdtemp(prefix="qarl-team-"))
        self.members: list[SamplerProcess] = []
        try:
            for index, gpu in enumerate(gpus):
                own_log = log if index == 0 else log.with_suffix(f".{index}{log.suffix}")
                self.members.append(SamplerProcess(learner, gpu, "fast", own_log, timeout_s))
        except BaseException:
            self.close()
            raise
        self.transports = [transport for member in self.members for transport in member.transports]

    def start(self, settings: SamplerSettings, expected: Mapping[str, Fingerprint], tick: Progress) -> None:
        arguments = parallel_arguments(len(self.members), settings.on_gpu) | settings.arguments
        shards, rendezvous = len(self.members), self._folder / "store"
        try:
            for index, member in enumerate(self.members):
                own = replace(settings, arguments=arguments, shard=index, shards=shards, rendezvous=rendezvous)
                member.begin_start(own, expected)
        except BaseException:
            self._close_all()
            raise
        found = self._answers(tick)
        self.capabilities = found[0] | {"proved_frac": min(each["proved_frac"] for each in found)}

    def begin(self, operation: str, payload: Any) -> None:
        self._operation = operation
        try:
            for index, member in enumerate(self.members):
                own = payload
                if isinstance(payload, WeightUpdate):
                    own = replace(payload, payloads=[payload.payloads[index]])
                member.begin(operation, own)
        except BaseException:
            self._close_all()
            raise

    def finish(self, tick: Progress) -> Any:
        results = self._answers(tick)
        if self._operation == "generate" and any(result != results[0] for result in results):
            self._close_all()
            raise SamplerFault("its processes sampled different tokens")
        if self._operation == "sleep" and None not in results:
            return max(results)  # freed bytes per GPU
        return results[0]

    def close(self) -> None:
        self._close_all()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self, tick: Progress) -> list[Any]:
        """Wait for all answers. Raises a PublishError after all have arrived. Other exceptions kill all processes."""
        waiting, refused = list(self.members), None
        try:
            for member in self.members:
                member.expect_answer()
            while waiting:
                for member in list(waiting):
                    try:
                        if member.poll(TICK_S / len(self.members)):
                            waiting.remove(member)
                    except PublishError as error:
                        refused = refused or error
                        waiting.remove(member)
                tick(*self.members[0].progress)
        except BaseException:
            self._close_all()
            raise
        if refused is not None:
            raise refused
        return [member.result for member in self.members]

    def _close_all(self) -> None:
        for member in self.members:
            member.close()


def parallel_arguments(count: int, on_gpu: bool) -> dict[str, Any]:
    """Return arguments of `vllm.LLM` that are common to `count` tensor parallel processes."""
    arguments: dict[str, Any] = {
        "tensor_parallel_size": count,
        "distributed_executor_backend": "external_launcher",
        "disable_custom_all_reduce": True,  # needs the other processes' GPUs to be visible; NCCL reduces instead
        "async_scheduling": False,  # depends on timing, which may differ between processes
    }
    if on_gpu:
        arguments["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    return arguments


SHARED = ("psm_", "cpushm")  # name prefixes of vLLM's shared memory: Python's, and for all-reduces on the CPU


@contextmanager
def rendezvous(file: Path, backend: str, index: int, count: int) -> Iterator[None]:
    """Context manager: vLLM starts as tensor parallel rank `index` of `count`.

    The rendezvous is a file that only this user can open, instead of vLLM's TCP store, and connections use the loopback
    interface (`settings.ENVIRONMENT`).

    Args:
        file: A new file, the same for all processes, in a private directory.
        backend: Backend of the default process group.
        index: Rank of this process.
        count: Number of processes.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    os.environ["VLLM_RPC_BASE_PATH"] = str(file.parent)  # where vLLM creates its sockets
    os.environ |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}  # NCCL alone is enough
    dist.init_process_group(backend, store=dist.FileStore(str(file), count), rank=index, world_size=count)
    # (init method, rank, local rank). The process group exists already, so vLLM only uses the init method to name
    # shared memory on the CPU. Hence it must differ between two vLLMs of a machine.
    arguments = (f"env://:{file.parent.name}", index, 0)
    ExecutorWithExternalLauncher._distributed_args = lambda self: arguments
    yield
    if all_agree(True):  # all have opened the shared memory
        _forget_names()


def all_agree(ok: bool) -> bool:
    """Return whether every process of the model passes True. A collective."""
    from vllm.distributed.parallel_state import get_world_group

    answer = torch.tensor([ok], dtype=torch.int32)
    dist.all_reduce(answer, dist.ReduceOp.MIN, group=get_world_group().cpu_group)
    return bool(answer)


def _forget_names() -> None:
    """Unlink vLLM's shared memory. It stays usable until the processes end, and does not leak when they are killed."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/dev/shm/")[2]
        if any(part in path for part in SHARED):
            with suppress(OSError):
                os.unlink(f"/dev/shm/{path}")


@dataclass(frozen=True)
class Shard:
    """Tensor parallel rank `index` of `count`."""

    index: int = 0
    count: int = 1


def shard_of(name: str, tensor: Tensor, shard: Shard) -> Tensor:
    """Return one GPU's part of a published tensor, as a view.

    Scales and zero points are split like their weights. A scale of the whole weight is replicated, and so is a scale
    that all output features share. Raises UserError if the tensor cannot be split evenly.
    """
    layer = name.split(".")[-2] if "." in name else ""
    if shard.count == 1 or name.endswith(METADATA):
        return tensor
    if layer in BY_VOCABULARY:
        padded = math.ceil(tensor.shape[0] / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        each = padded // shard.count
        return tensor[shard.index * each : (shard.index + 1) * each]
    if layer in BY_ROWS and tensor.ndim and tensor.shape[0] > 1:
        return _part(name, tensor, 0, shard)
    if layer in BY_COLUMNS and tensor.ndim == 2 and tensor.shape[1] > 1:
        return _part(name, tensor, 1, shard)
    return tensor


def shard_fingerprints(tensors: Iterable[tuple[str, Tensor]], shard: Shard) -> dict[str, Fingerprint]:
    """Return fingerprints of one GPU's parts of published tensors, by name, without metadata."""
    return fingerprints(
        (name, shard_of(name, tensor, shard).contiguous()) for name, tensor in tensors if not name.endswith(METADATA)
    )


def _part(name: str, tensor: Tensor, dim: int, shard: Shard) -> Tensor:
    each, rest = divmod(tensor.shape[dim], shard.count)
    if rest:
        raise UserError(
            f"rollout.vllm.tensor_parallel: '{name}' of shape {tuple(tensor.shape)} cannot be split evenly into "
            f"{shard.count} parts along dimension {dim}; use fewer GPUs, or smaller groups"
        )
    return tensor.narrow(dim, shard.index * each, each)
