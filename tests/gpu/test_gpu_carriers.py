"""Publishing on a CUDA device: fingerprints and patches there, CUDA IPC on one GPU, NCCL between two."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from qarl_kernels.digest import digest
from torch import Tensor

from qarl.publish.delta import apply_patch, patch_of
from qarl.publish.verify import fingerprints
from qarl.rollout.vllm.gpu_carriers import CudaIpcCarrier, NcclCarrier
from qarl.rollout.vllm.transport import ReceiverPlan

sys.path.insert(0, str(Path(__file__).parent.parent / "rollout_vllm"))
from far_side import Sampler, ragged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"),
]

FIRST = torch.device("cuda", 0)
BIG = 64 << 20  # bytes; above what the caching allocator serves from small blocks


def snapshot(seed: int = 0) -> dict[str, Tensor]:
    """Ragged tensors on the GPU, one of them large; `shape` stays on the CPU as in a snapshot."""
    tensors = {name: tensor if name == "shape" else tensor.to(FIRST) for name, tensor in ragged(seed).items()}
    tensors["big"] = torch.full((BIG // 4,), seed, dtype=torch.int32, device=FIRST)
    return tensors


# --- fingerprints and patches


def test_fingerprints_of_a_gpu_are_plain_digests_beside_sha256_of_the_cpu() -> None:
    tensors = snapshot()
    found = fingerprints(tensors.items())
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        kind, value = found[name].digest.split(":")
        assert (kind == "sha256") if name == "shape" else (kind, value) == ("mix64", digest(tensor)), name


@pytest.mark.parametrize("name", ["packed", "scale", "fp8", "int8", "big"])
def test_a_patch_turns_the_old_tensor_into_the_new_one_on_the_gpu(name: str) -> None:
    old = snapshot()[name]
    new = old.clone()
    new.view(-1).view(torch.uint8)[-1] ^= 1
    patch = patch_of(old, new)
    assert patch is not None and patch.indices.is_cuda and patch.values.numel() == 1
    apply_patch(old, patch)
    assert torch.equal(old.view(-1).view(torch.uint8), new.view(-1).view(torch.uint8))


# --- CUDA IPC


@pytest.fixture(scope="module")
def neighbour() -> Iterator[Sampler]:
    made = Sampler(ReceiverPlan("cuda_ipc"))
    yield made
    assert made.close() == 0


def test_tensors_arrive_on_the_same_gpu_publish_after_publish(neighbour: Sampler) -> None:
    carrier = CudaIpcCarrier()
    for seed in range(3):
        tensors = snapshot(seed)
        found = neighbour.sent(carrier, tensors)
        assert found == fingerprints(tensors.items()) and list(found) == list(tensors)
    carrier.close()


def test_tensors_of_one_version_can_be_sent_twice(neighbour: Sampler) -> None:
    carrier, tensors = CudaIpcCarrier(), snapshot()
    assert neighbour.sent(carrier, tensors) == neighbour.sent(carrier, tensors) == fingerprints(tensors.items())


def test_a_write_still_queued_when_packed_is_seen(neighbour: Sampler) -> None:
    carrier = CudaIpcCarrier()
    tensor = torch.zeros(BIG // 4, dtype=torch.int32, device=FIRST)
    torch.cuda._sleep(500_000_000)
    tensor.fill_(7)
    found = neighbour.sent(carrier, {"late": tensor})
    assert found == fingerprints([("late", torch.full_like(tensor, 7))])


def _allocated() -> int:
    torch.cuda.synchronize()
    torch.cuda.ipc_collect()
    return torch.cuda.memory_allocated()


def test_memory_comes_back_after_a_publish(neighbour: Sampler) -> None:
    before = _allocated()
    carrier, tensors = CudaIpcCarrier(), snapshot()
    neighbour.sent(carrier, tensors)
    del tensors
    assert _allocated() == before


@pytest.mark.parametrize("taken", [False, True])
def test_memory_comes_back_after_a_receiver_that_died(taken: bool) -> None:
    before = _allocated()
    sampler, carrier, tensors = Sampler(ReceiverPlan("cuda_ipc")), CudaIpcCarrier(), snapshot()
    parcel = carrier.pack(tensors)
    if taken:
        sampler.connection.send(parcel)
        assert sampler.connection.poll(180)
    sampler.process.kill()
    sampler.process.wait()
    carrier.close()
    del tensors
    assert _allocated() == before


# --- NCCL


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("buffer_bytes", [1 << 12, 1 << 20, 512 << 20])
def test_tensors_arrive_on_another_gpu_publish_after_publish(buffer_bytes: int) -> None:
    pytest.importorskip("vllm", reason="NCCL is reached through vLLM, which is not installed")
    carrier = NcclCarrier(FIRST, buffer_bytes)
    sampler = Sampler(ReceiverPlan("nccl", address=carrier.address), gpu=1)
    carrier.connect()
    for seed in range(3):
        tensors = snapshot(seed)
        assert sampler.sent(carrier, tensors) == fingerprints(tensors.items())
    carrier.close()
    assert sampler.close() == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_gpu_is_usable_after_a_receiver_died_before_its_broadcasts() -> None:
    pytest.importorskip("vllm", reason="NCCL is reached through vLLM, which is not installed")
    carrier = NcclCarrier(FIRST)
    sampler = Sampler(ReceiverPlan("nccl", address=carrier.address), gpu=1)
    carrier.connect()
    sampler.sent(carrier, snapshot())
    sampler.process.kill()
    sampler.process.wait()
    carrier.pack(snapshot(1))
    carrier.transmit()
    carrier.close()
    torch.cuda.synchronize(FIRST)
    assert int(torch.ones(3, device=FIRST).sum()) == 3
