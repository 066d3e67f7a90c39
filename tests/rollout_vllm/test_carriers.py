"""Carriers: tensors arrive in another process bit for bit, in order, publish after publish."""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Iterator

import pytest
import torch
from far_side import Sampler, ragged, random_bytes
from torch import Tensor

from qarl.publish.delta import Patch, flatten, plan_shipment, unflatten
from qarl.publish.verify import fingerprints
from qarl.rollout.vllm.carriers import MemoryFileCarrier, MemoryFileReceiver
from qarl.rollout.vllm.gpu_carriers import CudaIpcCarrier, CudaIpcReceiver, NcclCarrier
from qarl.rollout.vllm.parcels import ALIGNED, packed_buffers, plan_buffers, unpacked
from qarl.rollout.vllm.transport import ReceiverPlan


@pytest.fixture(scope="module")
def carrier() -> Iterator[MemoryFileCarrier]:
    made = MemoryFileCarrier()
    yield made
    made.close()


@pytest.fixture(scope="module")
def sampler(carrier: MemoryFileCarrier) -> Iterator[Sampler]:
    made = Sampler(ReceiverPlan("memory", fd=carrier.fd))
    yield made
    assert made.close() == 0


# --- a file in memory, a real process


@pytest.mark.slow
def test_every_dtype_and_size_arrives_in_another_process_in_order(sampler, carrier) -> None:
    tensors = ragged()
    found = sampler.sent(carrier, tensors)
    assert found == fingerprints(tensors.items()) and list(found) == list(tensors)


@pytest.mark.slow
def test_the_file_serves_smaller_and_larger_parcels_after_one_another(sampler, carrier) -> None:
    for count in (10, 1, 1 << 20, 3):
        tensors = {"a": random_bytes((count,), torch.int32, seed=count), "b": torch.ones(2)}
        assert sampler.sent(carrier, tensors) == fingerprints(tensors.items())


@pytest.mark.slow
def test_an_empty_parcel_arrives(sampler, carrier) -> None:
    assert sampler.sent(carrier, {}) == {}


@pytest.mark.slow
def test_patches_arrive(sampler, carrier) -> None:
    old = ragged()
    new = old | {"last": old["last"].clone().index_fill_(0, torch.tensor([500]), 2.0)}
    prints = fingerprints(new.items()), fingerprints(old.items())
    flat = flatten(plan_shipment(new, *prints, old, {}, "delta"))
    assert list(flat) == ["last#indices", "last#values"]
    assert sampler.sent(carrier, flat) == fingerprints(flat.items())


# --- a file in memory, both ends here


@pytest.fixture
def receiver(carrier: MemoryFileCarrier) -> Iterator[MemoryFileReceiver]:
    made = MemoryFileReceiver(os.dup(carrier.fd))
    yield made
    made.close()


def test_tensors_that_are_not_contiguous_arrive(carrier, receiver) -> None:
    matrix = torch.arange(12).view(3, 4).t()
    ((_, arrived),) = receiver.take(carrier.pack({"m": matrix}))
    assert torch.equal(arrived, matrix)


def test_tensors_start_at_aligned_addresses(carrier, receiver) -> None:
    assert all(tensor.data_ptr() % ALIGNED == 0 for _, tensor in receiver.take(carrier.pack(ragged())))


def test_a_tensor_outlives_the_iterator_it_came_from(carrier, receiver) -> None:
    taken = receiver.take(carrier.pack(ragged()))
    _, first = next(taken)
    del taken
    gc.collect()
    assert torch.equal(first, ragged()["packed"])


def test_what_the_receiver_writes_reaches_nobody_else(carrier, receiver) -> None:
    parcel = carrier.pack(ragged())
    for _, tensor in receiver.take(parcel):
        tensor.zero_()
    assert fingerprints(receiver.take(parcel)) == fingerprints(ragged().items())


def test_a_parcel_is_small_whatever_the_tensors(carrier) -> None:
    names = [f"model.layers.{i}.self_attn.q_proj.weight_packed" for i in range(500)]
    parcel = carrier.pack(dict.fromkeys(names, torch.zeros(1000)))
    assert len(pickle.dumps(parcel)) < 200 * 500


# --- what the carriers for GPUs do that needs none


def test_buffers_are_bounded_and_in_order() -> None:
    tensors = {str(i): random_bytes((size,), torch.int8) for i, size in enumerate([100, 60, 60, 400, 1, 299, 300])}
    plan = plan_buffers(tensors, 300)
    assert plan.buffers == (192 + 60, 400, 1, 299, 300)
    assert [entry.place for entry in plan.entries] == [(0, 0), (0, 128), (0, 192), (1, 0), (2, 0), (3, 0), (4, 0)]
    assert [entry.name for entry in plan.entries] == list(tensors)


@pytest.mark.parametrize("limit", [1, 64, 300, 1 << 20])
def test_buffers_of_any_size_carry_every_tensor(limit: int) -> None:
    tensors = ragged()
    plan = plan_buffers(tensors, limit)
    line = [buffer.clone() for buffer in packed_buffers(plan, tensors)]
    assert tuple(buffer.numel() for buffer in line) == plan.buffers
    sizes: list[int] = []

    def receive(size: int) -> Tensor:
        sizes.append(size)
        return line.pop(0)

    assert fingerprints(unpacked(plan, receive)) == fingerprints(tensors.items())
    assert not line and tuple(sizes) == plan.buffers


def test_cpu_tensors_beside_those_of_a_gpu_travel_inside_the_parcel_by_ipc() -> None:
    parcel = pickle.loads(pickle.dumps(CudaIpcCarrier().pack(ragged())))
    receiver = CudaIpcReceiver(torch.device("cuda", 0))
    assert fingerprints(receiver.take(parcel)) == fingerprints(ragged().items())


def test_cpu_tensors_beside_those_of_a_gpu_travel_inside_the_parcel_by_nccl() -> None:
    carrier = NcclCarrier(torch.device("cuda", 0))
    parcel = pickle.loads(pickle.dumps(carrier.pack(ragged())))
    carrier.close()
    assert not parcel.buffers
    assert fingerprints(unpacked(parcel, torch.empty)) == fingerprints(ragged().items())


def test_a_counter_of_a_receiver_is_read_where_torch_keeps_it() -> None:
    counters = torch.tensor([0, 1, 0, 2, 0, 0, 0, 0, 0, 5, 0])
    _, name, _ = counters.untyped_storage()._share_filename_cpu_()  # as torch shares the counters of CUDA IPC
    handles = [(*[None] * CudaIpcCarrier._COUNTER, name, slot) for slot in range(len(counters))]
    assert [CudaIpcCarrier()._awaited(handle) for handle in handles] == (counters > 0).tolist()
    del counters
    assert not CudaIpcCarrier()._awaited((*[None] * CudaIpcCarrier._COUNTER, b"/torch_no_such_file", 1))


def test_a_shipment_survives_the_way_through_a_carrier(carrier, receiver) -> None:
    old = ragged()
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["last"][500] = 2.0
    new["int8"] += 1
    shipment = plan_shipment(new, fingerprints(new.items()), fingerprints(old.items()), old, {}, "delta")
    arrived = dict(unflatten(receiver.take(carrier.pack(flatten(shipment)))))
    patch = arrived["last"]
    assert isinstance(patch, Patch) and torch.equal(patch.values, shipment.patches["last"].values)
    assert torch.equal(arrived["int8"], new["int8"]) and len(arrived) == 2
