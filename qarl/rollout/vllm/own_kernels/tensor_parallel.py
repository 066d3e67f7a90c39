"""One vLLM in several processes, each with a part of the model on its own GPU.

Each process is a whole vLLM engine that gets the same requests; they meet in the model's all-reduces. A failing process
leaves the others waiting in an all-reduce, so all of them are ended with it.

vLLM splits q, k, v, gate and up by output features, o and down by input features, and embedding and output layer by
words of a vocabulary padded to a multiple of 64. Everything else is replicated.
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
BY_WORDS = ("embed_tokens", "lm_head")
WORDS = 64  # the vocabulary is padded to a multiple of this


class TensorParallelSampler(Sampler):
    """Several processes as one sampler; see `SamplerProcess`.

    Args:
        gpus: CUDA index of each process's GPU, in the order of the model's parts.
        log: Of the first process. The others' logs have the part's number before the suffix.
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
            self._end()
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
            self._end()
            raise

    def finish(self, tick: Progress) -> Any:
        results = self._answers(tick)
        if self._operation == "generate" and any(result != results[0] for result in results):
            self._end()
            raise SamplerFault("its processes drew different tokens")
        if self._operation == "sleep" and None not in results:
            return max(results)  # bytes of a GPU
        return results[0]

    def close(self) -> None:
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self, tick: Progress) -> list[Any]:
        """All answers, once all have arrived. A refused publish is raised then; other exceptions end all processes."""
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
            self._end()
            raise
        if refused is not None:
            raise refused
        return [member.result for member in self.members]

    def _end(self) -> None:
        for member in self.members:
            member.close()


def parallel_arguments(count: int, on_gpu: bool) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` in each of `count` processes."""
    arguments: dict[str, Any] = {
        "tensor_parallel_size": count,
        "distributed_executor_backend": "external_launcher",
        "disable_custom_all_reduce": True,  # it asks for GPUs that this process does not see; sums go over NCCL
        "async_scheduling": False,  # decides by timing, which may differ between the processes
    }
    if on_gpu:
        arguments["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    return arguments


SHARED = ("psm_", "cpushm")  # in the names of what vLLM shares memory by: Python's, and that of its sums on the CPU


@contextmanager
def rendezvous(file: Path, backend: str, index: int, count: int) -> Iterator[None]:
    """Let vLLM start as process `index` of `count`. The processes meet in a file that only their user can open.

    They connect over the loopback interface (`settings.ENVIRONMENT`); vLLM's own way is torchrun's TCP store. file:
    New, and the same for all. backend: Of the default group.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    os.environ["VLLM_RPC_BASE_PATH"] = str(file.parent)  # for sockets
    os.environ |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}  # NCCL needs no more
    dist.init_process_group(backend, store=dist.FileStore(str(file), count), rank=index, world_size=count)
    # (init method of the groups, unused here; rank; index of its GPU among the visible ones). On the CPU vLLM names
    # shared memory after the first, which must differ between two vLLMs of a machine.
    found = (f"env://:{file.parent.name}", index, 0)
    ExecutorWithExternalLauncher._distributed_args = lambda self: found
    yield
    if all_agree(True):  # all have opened the shared memory
        _forget_names()


def all_agree(well: bool) -> bool:
    """Whether all is well in every process of the model; a collective."""
    from vllm.distributed.parallel_state import get_world_group

    answer = torch.tensor([well], dtype=torch.int32)
    dist.all_reduce(answer, dist.ReduceOp.MIN, group=get_world_group().cpu_group)
    return bool(answer)


def _forget_names() -> None:
    """Unlink shared memory, which then lasts as long as its processes; they end by being killed."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/dev/shm/")[2]
        if any(part in path for part in SHARED):
            with suppress(OSError):
                os.unlink(f"/dev/shm/{path}")


@dataclass(frozen=True)
class Shard:
    """GPU `index` (from 0) of the `count` GPUs that hold a model."""

    index: int = 0
    count: int = 1


def shard_of(name: str, tensor: Tensor, shard: Shard) -> Tensor:
    """Return a GPU's part of a published tensor, as a view.

    Scales and zero points are split with their weights. A scale for all output features or for the whole weight is
    replicated. Raises UserError if the tensor cannot be split evenly.
    """
    layer = name.split(".")[-2] if "." in name else ""
    if shard.count == 1 or name.endswith(METADATA):
        return tensor
    if layer in BY_WORDS:
        each = math.ceil(tensor.shape[0] / WORDS) * WORDS // shard.count
        return tensor[shard.index * each : (shard.index + 1) * each]
    if layer in BY_ROWS and tensor.ndim and tensor.shape[0] > 1:
        return _part(name, tensor, 0, shard)
    if layer in BY_COLUMNS and tensor.ndim == 2 and tensor.shape[1] > 1:
        return _part(name, tensor, 1, shard)
    return tensor


def shard_prints(tensors: Iterable[tuple[str, Tensor]], shard: Shard) -> dict[str, Fingerprint]:
    """Return fingerprints of a GPU's parts of published tensors, by name, without those of metadata."""
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
