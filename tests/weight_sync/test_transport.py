"""Transports: tensors arrive in another process bit for bit, in order, publish after publish."""

import gc
import os
import pickle
from collections.abc import Iterator

import pytest
import torch
from far_side import ragged, random_bytes

from qarl.weight_sync.fingerprints import fingerprints
from qarl.weight_sync.transport import (
    ALIGNED,
    CudaHandle,
    CudaIpcTransport,
    Entry,
    MemoryFileReceiver,
    MemoryFileTransport,
    Payload,
)

# --- a file in memory


@pytest.fixture(scope="module")
def transport() -> Iterator[MemoryFileTransport]:
    made = MemoryFileTransport()
    yield made
    made.close()


@pytest.fixture
def receiver(transport: MemoryFileTransport) -> MemoryFileReceiver:
    return MemoryFileReceiver(transport.fd)


def test_every_dtype_and_size_arrives_in_order(transport, receiver) -> None:
    for count in (10, 1, 1 << 20, 3):  # smaller and larger ones in the same file
        tensors = ragged() | {"a": random_bytes((count,), torch.int32, seed=count), "b": torch.ones(2)}
        taken = dict(receiver.take(transport.pack(tensors)))
        assert fingerprints(taken.items()) == fingerprints(tensors.items()) and list(taken) == list(tensors)


def test_tensors_arrive_contiguous_aligned_and_outlive_the_iterator(transport, receiver) -> None:
    matrix = torch.arange(12).view(3, 4).t()
    ((_, arrived),) = receiver.take(transport.pack({"m": matrix}))
    assert torch.equal(arrived, matrix)
    assert all(tensor.data_ptr() % ALIGNED == 0 for _, tensor in receiver.take(transport.pack(ragged())))
    taken = receiver.take(transport.pack(ragged()))
    _, first = next(taken)
    del taken
    gc.collect()
    assert torch.equal(first, ragged()["packed"])


def test_writes_of_the_receiver_reach_nobody_else(transport, receiver) -> None:
    payload = transport.pack(ragged())
    for _, tensor in receiver.take(payload):
        tensor.zero_()
    assert fingerprints(receiver.take(payload)) == fingerprints(ragged().items())


def test_the_memory_file_has_no_name_that_another_user_could_open(transport) -> None:
    assert os.fstat(transport.fd).st_nlink == 0


def test_a_payload_is_small_whatever_the_tensors(transport) -> None:
    names = [f"model.layers.{i}.self_attn.q_proj.weight_packed" for i in range(500)]
    payload = transport.pack(dict.fromkeys(names, torch.zeros(1000)))
    assert len(pickle.dumps(payload)) < 200 * 500


# --- what the transport for GPUs does that needs none


def arrived(payload: Payload) -> Payload:
    """What the other side reads of the message that carries a payload."""
    return pickle.loads(pickle.dumps(payload))


def test_every_kind_of_place_arrives_as_it_was_sent() -> None:
    handle = CudaHandle((7, 1), 3, 1, b"\0\xff", 1 << 40, 512, b"/torch_1_2", 9, b"e", True)
    entries = [Entry("big", "int32", (33, 7), handle), Entry("small", "float8_e4m3fn", (), 64)]
    payload = Payload((*entries, *CudaIpcTransport((0,)).pack(ragged()).entries), 1 << 33)
    assert arrived(payload) == payload
