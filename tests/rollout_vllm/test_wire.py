"""The messages between learner and sampler: what is sent arrives, and rubbish is a fault of one line, never a hang."""

from __future__ import annotations

import json
import math
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import fake_sampler
import pytest
from far_side import NO_SETTINGS
from test_engine_process import ORDER, ignore, start  # noqa: F401  a fixture

from qarl.rollout.vllm.messages import (
    data_limit,
    done,
    failed,
    order,
    read_done,
    read_failed,
    read_order,
    read_progress,
)
from qarl.rollout.vllm.settings import Drawing, Request, Response
from qarl.rollout.vllm.wire import HEADER, MAGIC, Channel, Message, WireError, WireTimeout, channel_pair
from qarl.weight_sync.connection import SamplerFault
from qarl.weight_sync.fingerprints import Fingerprint
from qarl.weight_sync.payload import CudaHandle, Entry, Payload
from qarl.weight_sync.transport import ReceiverPlan
from qarl.weight_sync.update import WeightUpdate
from qarl.weight_sync.verify import PublishError

DRAWING = Drawing(8, 0.7, 20, 0.95, 0.1, ("\n\n", "π"), (1, 2))
REQUESTS = [Request([5, 2**31 - 1], 2**63 - 1), Request([0], 0), Request([7] * 5, 1)]
DRAWN = [
    Response([1, 2], [-0.1, -math.pi], "stop", 1),
    Response([], [], "length", None),
    Response([3], [-1.5], "stop", "π"),
]
PRINTS = {"a.weight": Fingerprint((3, 4), "torch.int32", "sha256:00"), "b": Fingerprint((), "torch.half", "mix64:1")}
HANDLE = CudaHandle((4, 1), 2, 0, "ff00", 512, 0, "2f74", 3, "00", True)
PLACES = (64, "00" * 48, HANDLE)
PAYLOAD = Payload(tuple(Entry(f"a{place}", "int32", (3, 4), place) for place in PLACES), 512)
PUBLICATION = WeightUpdate(3, [PAYLOAD], PRINTS, [[5, 6, 7], [1, 2]])
ORDERS: list[tuple[str, Any]] = [
    ("publish", PUBLICATION),
    ("score", [[5, 6, 7], [1, 2]]),
    ("generate", (REQUESTS, DRAWING)),
    ("sleep", 2),
    ("wake", None),
    ("abort", None),
]
RESULTS: list[tuple[str, Any, Any]] = [
    ("publish", PUBLICATION, ({"load": 0.25}, [[-0.5, -1.0], [math.nan]])),
    ("score", [[5, 6]], [[-math.inf]]),
    ("generate", (REQUESTS, DRAWING), DRAWN),
    ("generate", ([], DRAWING), []),
    ("sleep", 1, 1 << 40),
    ("sleep", 1, None),
    ("wake", None, None),
]


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    here, there = channel_pair()
    ends = here, Channel(there)
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def raw() -> Iterator[tuple[Channel, socket.socket]]:
    here, there = channel_pair()
    yield here, there
    here.close()
    there.close()


def sent(pair: tuple[Channel, Channel], message: Message) -> Message:
    """What arrives of a message, which may be larger than what a socket holds."""
    sender = threading.Thread(target=pair[0].send, args=(message, 100))
    sender.start()
    arrived = pair[1].poll(100)
    sender.join()
    assert arrived is not None
    return arrived


# --- what is sent arrives


@pytest.mark.parametrize(("operation", "payload"), ORDERS, ids=[name for name, _ in ORDERS])
def test_an_order_arrives_as_it_was_given(pair, operation, payload) -> None:
    message = sent(pair, order(operation, payload))
    assert message.kind == operation and read_order(message) == payload


@pytest.mark.parametrize(("operation", "payload", "result"), RESULTS)
def test_a_result_arrives_as_it_was(pair, operation, payload, result) -> None:
    pair[1].data_limit = data_limit(operation, payload)
    assert repr(read_done(operation, payload, sent(pair, done(operation, result)))) == repr(result)  # NaN is not NaN


def test_the_start_of_a_sampler_arrives(pair) -> None:
    plan = ReceiverPlan(fds=(7,), gpus=(1, 0))
    args = {"compilation_config": {"mode": 0, "sizes": [1, 2.5, None, "x"]}}
    settings = replace(NO_SETTINGS, args=args, cuda=1, threads=3)
    payload = (settings, PRINTS, plan)
    assert read_order(sent(pair, order("start", payload))) == payload
    capabilities = {"proved_frac": 0.5, "notes": ["π"], "phases": {"imports": 0.25}}
    assert read_done("start", payload, sent(pair, done("start", capabilities | {"more": 1}))) == capabilities


def test_a_failure_arrives_whatever_its_message(pair) -> None:
    for text in ("out of blocks", "two\nlines", "lone \ud800", "\x1b[31mred", "π" * 100_000):
        error = read_failed(sent(pair, failed(text, refused=True)))
        assert isinstance(error, PublishError)
        assert str(error).startswith(text[:3]) or not text[:3].isprintable()
    assert isinstance(read_failed(sent(pair, failed("out of blocks", refused=False))), SamplerFault)


def test_messages_come_one_after_the_other_however_they_are_cut(raw) -> None:
    here, there = raw
    stream = random.Random(14)
    orders = [stream.choice(ORDERS) for _ in range(40)]
    frames = b"".join(_frame(order(*each)) for each in orders)
    cuts = sorted(stream.randrange(len(frames)) for _ in range(200))
    arrived: list[Message] = []
    for start_, end in zip([0, *cuts], [*cuts, len(frames)], strict=True):
        there.sendall(frames[start_:end])
        while (message := here.poll(0)) is not None:
            arrived.append(message)
    assert [(message.kind, read_order(message)) for message in arrived] == orders


def test_a_message_larger_than_the_socket_holds_arrives(pair) -> None:
    data = random.Random(1).randbytes(30 << 20)
    assert sent(pair, Message("done", ["x" * (1 << 20)], data)) == Message("done", ["x" * (1 << 20)], data)


# --- what is no message


def _frame(message: Message) -> bytes:
    text = json.dumps([message.kind, message.body]).encode()
    return HEADER.pack(MAGIC, len(text), len(message.data)) + text + message.data


def test_bytes_that_are_no_message_are_refused_and_never_waited_for() -> None:
    stream = random.Random(14)
    whole = [_frame(order(*each)) for each in ORDERS] + [_frame(done(name, result)) for name, _, result in RESULTS]
    outcomes = {"message": 0, "refused": 0, "waits": 0, "ended": 0}
    for _ in range(600):
        data = bytearray(stream.choice(whole))
        for _ in range(stream.randint(1, 4)):
            at = stream.randrange(len(data))
            match stream.randrange(4):
                case 0:
                    data[at] ^= 1 << stream.randrange(8)
                case 1:
                    del data[at : at + stream.randint(1, 20)]
                case 2:
                    data[at:at] = stream.randbytes(stream.randint(1, 20))
                case _:
                    data[at:] = b""
            data = data or bytearray(b"Q")
        here, there = channel_pair()
        here.data_limit = 1 << 20
        there.sendall(data)
        there.shutdown(socket.SHUT_WR)
        begin = time.monotonic()
        try:
            message = here.poll(120)
            outcomes["waits" if message is None else "message"] += 1
            if message is not None:
                _read_all(message)
        except WireError as error:
            outcomes["refused"] += 1
            assert str(error).isprintable()
        except EOFError:
            outcomes["ended"] += 1
        assert time.monotonic() - begin < 60
        here.close()
        there.close()
    assert outcomes["waits"] == 0 and min(outcomes["refused"], outcomes["ended"], outcomes["message"]) > 5, outcomes


def _read_all(message: Message) -> None:
    """Whatever it claims to be, every reader takes it or refuses it."""
    readers = [read_order, read_failed, read_progress, partial(read_done, "start", None)]
    for read in [*readers, *(partial(read_done, name, payload) for name, payload, _ in RESULTS)]:
        try:
            read(message)
        except WireError as error:
            assert "\n" not in str(error)


def test_json_of_every_wrong_shape_is_refused_by_every_reader() -> None:
    stream = random.Random(15)
    atoms = [None, True, -1, 2**62, 0.5, math.nan, "", "x", [], {}, [[]], [None], {"x": 1}, [1, 2], ["a", 3]]
    bodies = [order(*each).body for each in ORDERS] + [done(name, result).body for name, _, result in RESULTS]
    bodies += [order("start", (NO_SETTINGS, PRINTS, ReceiverPlan(fds=(3,)))).body]
    for _ in range(1500):
        body = json.loads(json.dumps(stream.choice(bodies)))
        if isinstance(body, (dict, list)) and body:
            _mutate(body, stream, atoms)
        kind = stream.choice(["start", "publish", "generate", "done", "score", "sleep", "failed", "x"])
        _read_all(Message(kind, body, stream.randbytes(stream.choice([0, 4, 36, 100]))))


def _mutate(value: dict | list, stream: random.Random, atoms: list) -> None:
    """Replace or remove one value somewhere inside."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = stream.choice(keys)
    if isinstance(value[key], (dict, list)) and value[key] and stream.random() < 0.7:
        _mutate(value[key], stream, atoms)
    elif stream.random() < 0.3:
        del value[key]
    else:
        value[key] = stream.choice(atoms)


def test_no_memory_is_taken_for_bytes_that_have_not_come(raw) -> None:
    here, there = raw
    there.sendall(HEADER.pack(MAGIC, 10, 1 << 39) + b'["done",0]')
    assert here.poll(0.05) is None
    assert len(here._buffer) < 100


def test_who_takes_nothing_is_not_waited_for_and_a_cut_message_ends_the_channel(raw) -> None:
    here, _ = raw
    with pytest.raises(WireTimeout):
        here.send(Message("publish", None, bytes(10 << 20)), 0.1)
    with pytest.raises(WireError, match="cut off"):
        here.send(Message("abort"))


# --- a sampler that writes it

CUT = ["frame/1/exit", "frame/17/exit", "frame/17", "frame/4"]  # in the middle of the first mark, or of a message


@pytest.mark.parametrize("name", [*fake_sampler.rubbish(), *CUT])
def test_a_sampler_that_writes_rubbish_is_ended_in_one_line(start, name) -> None:  # noqa: F811
    silent = "/" in name and not name.endswith("/exit")  # the others are ended for what they say, and at once
    sampler = start(f"generate rubbish {name}", timeout_s=1.0 if silent else 120.0)
    begin = time.monotonic()
    with pytest.raises(SamplerFault) as fault:
        sampler.call("generate", ORDER, ignore)
    line = str(fault.value)
    assert line.isprintable() and time.monotonic() - begin < 60
    if name.endswith("/exit"):
        assert line == "its process ended with exit code 3"
    elif silent:
        assert line == "it gave no sign of life for 1 s (rollout.vllm.timeout_s)"
    else:
        assert line.startswith("it sent an invalid answer: ")
    assert not fake_sampler.alive(sampler.pid)
