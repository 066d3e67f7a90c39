"""Which carrier takes tensors to a sampler in a process of its own, and what that process must open for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qarl.weight_sync.carriers import Carrier, MemoryFileCarrier, MemoryFileReceiver, Receiver
from qarl.weight_sync.gpu_carriers import CudaIpcCarrier, CudaIpcReceiver
from qarl.weight_sync.parcels import Parcel


@dataclass(frozen=True)
class ReceiverPlan:
    """What the sampler's process opens. fd: of the memory file, inherited.

    gpus: CUDA indices, as the learner numbers them, that the process sees: its own, and the learner's if that differs.
    """

    kind: Literal["memory", "cuda_ipc"]
    fd: int | None = None
    gpus: tuple[int, ...] = ()

    @property
    def fds(self) -> tuple[int, ...]:
        """File descriptors to be inherited."""
        return () if self.fd is None else (self.fd,)


def make_carrier(learner: torch.device, sampler_gpu: int | None) -> tuple[Carrier, ReceiverPlan]:
    """A memory file between processes on the CPU, CUDA IPC on one GPU or between two of one host.

    sampler_gpu: CUDA index, None: the learner's.
    """
    if learner.type == "cpu":
        carrier = MemoryFileCarrier()
        return carrier, ReceiverPlan("memory", fd=carrier.fd)
    source = learner_gpu(learner)
    own = source if sampler_gpu is None else sampler_gpu
    return CudaIpcCarrier(), ReceiverPlan("cuda_ipc", gpus=(own,) if own == source else (own, source))


def make_team(learner: torch.device, sampler_gpus: Sequence[int | None]) -> tuple[TeamCarrier, list[ReceiverPlan]]:
    """`make_carrier`, to several processes that hold a part of the model each: what each of them must open."""
    made = [make_carrier(learner, gpu) for gpu in sampler_gpus]
    return TeamCarrier([carrier for carrier, _ in made]), [plan for _, plan in made]


class TeamCarrier:
    """Packs tensors for several receivers, a parcel for each: a handle of CUDA IPC counts one receiver."""

    def __init__(self, carriers: Sequence[Carrier]) -> None:
        self._carriers = carriers

    def pack(self, tensors: Mapping[str, Tensor]) -> list[Parcel]:
        return [carrier.pack(tensors) for carrier in self._carriers]

    def release(self) -> None:
        for carrier in self._carriers:
            carrier.release()

    def close(self) -> None:
        for carrier in self._carriers:
            carrier.close()


def open_receiver(plan: ReceiverPlan) -> Receiver:
    """The receiver of a plan, in the sampler's process, which sees the plan's GPUs under the numbers 0 and 1."""
    match plan.kind:
        case "memory":
            assert plan.fd is not None
            return MemoryFileReceiver(plan.fd)
        case "cuda_ipc":
            return CudaIpcReceiver(torch.device("cuda", 0), torch.device("cuda", len(plan.gpus) - 1))


def learner_gpu(device: torch.device) -> int:
    """The CUDA index of the learner's GPU."""
    return torch.cuda.current_device() if device.index is None else device.index
