"""Which carrier takes tensors to a sampler in a process of its own, and what that process must open for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from qarl.rollout.vllm.carriers import Carrier, MemoryFileCarrier, MemoryFileReceiver, Receiver
from qarl.rollout.vllm.gpu_carriers import CudaIpcCarrier, CudaIpcReceiver, NcclCarrier, NcclReceiver


@dataclass(frozen=True)
class ReceiverPlan:
    """What the sampler's process opens; pickled. fd: of the memory file, inherited. address: of the NCCL group."""

    kind: Literal["memory", "cuda_ipc", "nccl"]
    fd: int | None = None
    address: tuple[str, int] | None = None

    @property
    def fds(self) -> tuple[int, ...]:
        """File descriptors to be inherited."""
        return () if self.fd is None else (self.fd,)


def make_carrier(learner: torch.device, sampler_gpu: int | None) -> tuple[Carrier, ReceiverPlan]:
    """A memory file between processes on the CPU, CUDA IPC on one GPU, NCCL between two.

    sampler_gpu: CUDA index, None: the learner's.
    """
    if learner.type == "cpu":
        carrier = MemoryFileCarrier()
        return carrier, ReceiverPlan("memory", fd=carrier.fd)
    if sampler_gpu in (None, learner_gpu(learner)):
        return CudaIpcCarrier(), ReceiverPlan("cuda_ipc")
    nccl = NcclCarrier(torch.device("cuda", learner_gpu(learner)))
    return nccl, ReceiverPlan("nccl", address=nccl.address)


def open_receiver(plan: ReceiverPlan) -> Receiver:
    """The receiver of a plan, in the sampler's process, which sees one GPU at most."""
    match plan.kind:
        case "memory":
            assert plan.fd is not None
            return MemoryFileReceiver(plan.fd)
        case "cuda_ipc":
            return CudaIpcReceiver(torch.device("cuda", 0))
        case "nccl":
            assert plan.address is not None
            return NcclReceiver(plan.address, torch.device("cuda", 0))


def learner_gpu(device: torch.device) -> int:
    """The CUDA index of the learner's GPU."""
    return torch.cuda.current_device() if device.index is None else device.index
