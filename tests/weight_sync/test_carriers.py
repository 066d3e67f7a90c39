"""Carriers: tensors arrive in another process bit for bit, in order, publish after publish."""

from __future__ import annotations

import gc
import inspect
import json
import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from far_side import Sampler, ragged, random_bytes
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from qarl.rollout.vllm.messages import order, read_order
from qarl.rollout.vllm.wire import Message
from qarl.weight_sync import gpu_carriers
from qarl.weight_sync.carriers import MemoryFileCarrier, MemoryFileReceiver
from qarl.weight_sync.delta import Patch
from qarl.weight_sync.fingerprints import fingerprints
from qarl.weight_sync.gpu_carriers import CudaIpcCarrier, CudaIpcReceiver
from qarl.weight_sync.parcels import ALIGNED, CudaHandle, Entry, Parcel, entry_of
from qarl.weight_sync.plan import flatten, plan_update, unflatten
from qarl.weight_sync.transport import ReceiverPlan
from qarl.weight_sync.update import WeightUpdate


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
    flat = flatten(plan_update(new, *prints, old, "delta"))
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
    assert len(json.dumps(order("publish", WeightUpdate(0, parcel, {}, [])).body)) < 200 * 500


# --- what the carrier for GPUs does that needs none


def arrived(parcel: Parcel) -> Parcel:
    """What the other side reads of the message that carries a parcel."""
    sent = order("publish", WeightUpdate(0, parcel, {}, []))
    return read_order(Message(sent.kind, json.loads(json.dumps(sent.body)), sent.data)).content


def test_every_kind_of_place_arrives_as_it_was_sent() -> None:
    handle = CudaHandle((7, 1), 3, 1, b"\0\xff".hex(), 1 << 40, 512, b"/torch_1_2".hex(), 9, b"e".hex(), True)
    entries = [Entry("big", "int32", (33, 7), handle), Entry("small", "float8_e4m3fn", (), 64)]
    parcel = Parcel((*entries, *CudaIpcCarrier().pack(ragged()).entries), 1 << 33)
    assert arrived(parcel) == parcel


def test_cpu_tensors_beside_those_of_a_gpu_travel_inside_the_parcel_by_ipc() -> None:
    parcel = arrived(CudaIpcCarrier().pack(ragged()))
    receiver = CudaIpcReceiver(torch.device("cuda", 0), torch.device("cuda", 0))
    assert fingerprints(receiver.take(parcel)) == fingerprints(ragged().items())


@pytest.mark.parametrize("source", [0, 1])
def test_torch_gets_back_what_it_gave_out_to_share_a_tensor(source: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the fields, where no GPU is needed to see it."""
    given = (
        Tensor,
        torch.Size((3, 4)),
        (4, 1),
        5,
        torch.TypedStorage,
        torch.bfloat16,
        7,
        b"h\0\xff",
        96,
        1 << 33,
        False,
        b"/torch_1_2_3",
        11,
        b"event\0",
        True,
    )
    assert len(given) == len(inspect.signature(rebuild_cuda_tensor).parameters)
    taken: list[tuple] = []

    class Opened:
        def to(self, device: torch.device) -> torch.device:
            return device

    monkeypatch.setattr(gpu_carriers, "reduce_tensor", lambda tensor: (rebuild_cuda_tensor, given))
    monkeypatch.setattr(gpu_carriers, "rebuild_cuda_tensor", lambda *args: taken.append(args) or Opened())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    tensor = torch.zeros(3, 4, dtype=torch.bfloat16)
    parcel = arrived(Parcel((entry_of("a", tensor, CudaIpcCarrier()._handle(tensor)),)))
    receiver = CudaIpcReceiver(torch.device("cuda", 0), torch.device("cuda", source))
    assert list(receiver.take(parcel)) == [("a", torch.device("cuda", 0))]
    assert taken == [(*given[:6], source, *given[7:])]  # the GPU's number is the receiver's own


def test_a_counter_of_a_receiver_is_read_where_torch_keeps_it() -> None:
    counters = torch.tensor([0, 1, 0, 2, 0, 0, 0, 0, 0, 5, 0])
    _, name, _ = counters.untyped_storage()._share_filename_cpu_()  # as torch shares the counters of CUDA IPC
    blank = CudaHandle((1,), 0, 0, "", 1, 0, name.hex(), 0, "", False)
    handles = [replace(blank, slot=slot) for slot in range(len(counters))]
    assert [CudaIpcCarrier()._awaited(handle) for handle in handles] == (counters > 0).tolist()
    del counters
    assert not CudaIpcCarrier()._awaited(replace(blank, counter=b"/torch_no_such_file".hex(), slot=1))


def test_a_shipment_survives_the_way_through_a_carrier(carrier, receiver) -> None:
    old = ragged()
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["last"][500] = 2.0
    new["int8"] += 1
    shipment = plan_update(new, fingerprints(new.items()), fingerprints(old.items()), old, "delta")
    arrived = dict(unflatten(receiver.take(carrier.pack(flatten(shipment)))))
    patch = arrived["last"]
    assert isinstance(patch, Patch) and torch.equal(patch.values, shipment.patches["last"].values)
    assert torch.equal(arrived["int8"], new["int8"]) and len(arrived) == 2
