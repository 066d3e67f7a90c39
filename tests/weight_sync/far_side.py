"""Receiver of a transport, a process that answers with what it received, and tensors to send to it."""

import os
import subprocess
import sys
from collections.abc import Mapping

import torch
from torch import Tensor

from qarl.rollout.vllm.channel import channel_pair
from qarl.weight_sync.fingerprints import Fingerprint
from qarl.weight_sync.transport import Payload, ReceiverPlan, Transport

CHILD = """
import socket, sys
from qarl.weight_sync.fingerprints import fingerprints
from qarl.weight_sync.transport import open_receiver
from qarl.rollout.vllm.channel import Channel

channel = Channel(socket.socket(fileno=int(sys.argv[1])))
_, plan = channel.poll(None)
receiver = open_receiver(plan)
while (order := channel.poll(None))[0] == "publish":
    taken = dict(receiver.take(order[1]))
    answer = fingerprints(taken.items()), {name: str(tensor.device) for name, tensor in taken.items()}
    del taken
    receiver.done()
    channel.send("done", answer)
"""


class Sampler:
    """A process that answers every payload with the fingerprints of the tensors that it received.

    devices: Devices of the last answer's tensors, as that process numbers them.
    """

    def __init__(self, plan: ReceiverPlan) -> None:
        self.channel, end = channel_pair()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        if plan.gpus:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(
                visible.split(",")[gpu] if visible else str(gpu) for gpu in plan.gpus
            )
        command = [sys.executable, "-c", CHILD, str(end.fileno())]
        self.process = subprocess.Popen(command, pass_fds=(end.fileno(), *plan.fds), env=environment)
        end.close()
        self.channel.send("start", plan)

    def sent(self, transport: Transport, tensors: Mapping[str, Tensor]) -> dict[str, Fingerprint]:
        """Publish the tensors, and return what arrived."""
        self.send(transport.pack(tensors))
        found = self.answer()
        transport.release()
        return found

    def send(self, payload: Payload) -> None:
        self.channel.send("publish", payload)

    def answer(self) -> dict[str, Fingerprint]:
        answer = self.channel.poll(180)
        assert answer is not None, "no answer"
        found, self.devices = answer[1]
        return found

    def close(self) -> int:
        self.channel.send("end")
        return self.process.wait(timeout=60)


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


def ragged(seed: int = 0) -> dict[str, Tensor]:
    """Return tensors of every dtype of a snapshot, with odd sizes, an empty tensor and a scalar."""
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
