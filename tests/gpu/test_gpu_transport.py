"""Publishing on a CUDA device: fingerprints and patches there, CUDA IPC on one GPU and between two."""

import os

import pytest
import torch
from far_side import Sampler, ragged
from listening import listening
from qarl_kernels.digest import digest
from torch import Tensor

from qarl.weight_sync.fingerprints import fingerprints
from qarl.weight_sync.transport import open_transport
from qarl.weight_sync.update import patch_of, patched

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
    assert patch.is_cuda and patch.shape == (2, 1)
    assert torch.equal(patched(old, patch).view(-1).view(torch.uint8), new.view(-1).view(torch.uint8))


# --- CUDA IPC


def _allocated() -> int:
    torch.cuda.synchronize()
    torch.cuda.ipc_collect()
    return torch.cuda.memory_allocated()


# --- a sampler on the learner's GPU, or on one of its own


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
WHERE = pytest.mark.parametrize("own", [None, pytest.param(1, marks=two_gpus)])  # the sampler's own GPU


@WHERE
def test_tensors_arrive_publish_after_publish(own: int | None) -> None:
    transport = open_transport(FIRST, own)
    assert transport.plan.gpus == ((0,) if own is None else (1, 0))
    sampler = Sampler(transport.plan)
    for seed in range(3):
        tensors = snapshot(seed)
        found = sampler.sent(transport, tensors)
        assert found == fingerprints(tensors.items()) and list(found) == list(tensors)
        assert all(
            device == "cpu" if name == "shape" else device == "cuda:0" for name, device in sampler.devices.items()
        )
    transport.close()
    assert sampler.close() == 0


@WHERE
def test_a_write_still_queued_when_packed_is_seen(own: int | None) -> None:
    transport = open_transport(FIRST, own)
    sampler = Sampler(transport.plan)
    tensor = torch.zeros(BIG // 4, dtype=torch.int32, device=FIRST)
    sampler.sent(transport, {"early": tensor})
    torch.cuda._sleep(500_000_000)
    tensor.fill_(7)
    found = sampler.sent(transport, {"late": tensor})
    assert found == fingerprints([("late", torch.full_like(tensor, 7))])
    transport.close()
    assert sampler.close() == 0


@WHERE
@pytest.mark.parametrize("taken", [False, True])
def test_memory_comes_back_after_a_receiver_that_died(taken: bool, own: int | None) -> None:
    before = _allocated()
    transport = open_transport(FIRST, own)
    sampler, tensors = Sampler(transport.plan), snapshot()
    sampler.send(transport.pack(tensors))
    if taken:
        sampler.answer()
    sampler.process.kill()
    sampler.process.wait()
    transport.close()
    del tensors
    assert _allocated() == before
    assert int(torch.ones(3, device=FIRST).sum()) == 3


@WHERE
def test_nothing_of_ours_listens_while_tensors_travel(own: int | None) -> None:
    """CUDA's driver keeps an abstract socket of its own in every process that uses a GPU; there is nothing else."""
    transport = open_transport(FIRST, own)
    sampler = Sampler(transport.plan)
    sampler.sent(transport, snapshot())
    found = {"learner": listening(os.getpid()), "sampler": listening(sampler.process.pid)}
    print(f"listening: {found}")
    for names in found.values():
        assert [name for name in names if not name.startswith("unix @cuda-")] == []
    transport.close()
    assert sampler.close() == 0
