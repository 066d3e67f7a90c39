"""The far side of a carrier: a process of its own that answers what it took, and tensors to send there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Pipe

import torch
from torch import Tensor

from qarl.publish.verify import Fingerprint
from qarl.rollout.vllm.carriers import Carrier
from qarl.rollout.vllm.transport import ReceiverPlan

CHILD = """
import sys
from multiprocessing.connection import Connection
from qarl.publish.verify import fingerprints
from qarl.rollout.vllm.transport import open_receiver

connection = Connection(int(sys.argv[1]))
receiver = open_receiver(connection.recv())
while (parcel := connection.recv()) is not None:
    connection.send(fingerprints(receiver.take(parcel)))
    receiver.done()
receiver.close()
"""


class Sampler:
    """A process of its own that answers every parcel with the fingerprints of what it took. gpu: the one it sees."""

    def __init__(self, plan: ReceiverPlan, gpu: int = 0) -> None:
        self.connection, end = Pipe()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu] if visible else str(gpu)
        command = [sys.executable, "-c", CHILD, str(end.fileno())]
        self.process = subprocess.Popen(command, pass_fds=(end.fileno(), *plan.fds), env=environment)
        end.close()
        self.connection.send(plan)

    def sent(self, carrier: Carrier, tensors: Mapping[str, Tensor]) -> dict[str, Fingerprint]:
        """Publish the tensors; what arrived."""
        self.connection.send(carrier.pack(tensors))
        carrier.transmit()
        assert self.connection.poll(180), "no answer"
        found = self.connection.recv()
        carrier.release()
        return found

    def close(self) -> int:
        self.connection.send(None)
        return self.process.wait(timeout=60)


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


def ragged(seed: int = 0) -> dict[str, Tensor]:
    """Every dtype of a snapshot, sizes that are multiples of nothing, an empty tensor, a scalar."""
    tensors = {
        "packed": random_bytes((33, 7), torch.int32, seed),
        "scale": random_bytes((33, 3), torch.bfloat16, seed),
        "shape": random_bytes((2,), torch.int64, seed),
        "fp8": random_bytes((5, 13), torch.float8_e4m3fn, seed),
        "int8": random_bytes((101,), torch.int8, seed),
        "empty": torch.empty(0, 4),
        "scalar": random_bytes((), torch.float32, seed),
    }
    tensors["last"] = random_bytes((1000, 3), torch.float16, seed)
    return tensors
