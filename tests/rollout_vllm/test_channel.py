"""Messages between learner and sampler: they arrive as sent, and invalid bytes are a one-line fault, never a hang."""

import math
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_sampler
import pytest
from fake_sampler import frame
from qarl_kernels.truncation import Truncation
from test_engine_process import ORDER, ignore, start  # noqa: F401  a fixture

from qarl.rollout.engine import SamplingParams
from qarl.rollout.vllm.channel import Channel, ChannelError, channel_pair
from qarl.rollout.vllm.settings import Request, Response
from qarl.weight_sync.fingerprints import Fingerprint
from qarl.weight_sync.sender import SamplerFault
from qarl.weight_sync.transport import CudaHandle, Entry, Payload, ReceiverPlan
from qarl.weight_sync.update import WeightUpdate

SETTINGS = replace(
    fake_sampler.settings(Path("none")),
    arguments={"compilation_config": {"mode": 0, "sizes": [1, 2.5, None, "x"]}},
    rendezvous=Path("there"),
)
SAMPLING = SamplingParams(1, 2**63, 8, Truncation(0.7, 20, 0.95, 0.1), ("\n\n", "π"), frozenset({1, 2}), True)
REQUESTS = [Request([5, 2**31 - 1], 2**63 - 1), Request([0], 0), Request([7] * 5, 1)]
RESPONSES = [
    Response([1, 2], [-0.1, -math.pi], "stop", 1, bytes(range(256))),
    Response([], [], "length", None),
    Response([3], [-1.5], "stop", "π"),
]
PRINTS = {"a.weight": Fingerprint((3, 4), "torch.int32", "sha256:00"), "b": Fingerprint((), "torch.half", "mix64:1")}
HANDLE = CudaHandle((4, 1), 2, 0, b"\xff\0", 512, 0, b"/t", 3, b"\0", True)
PAYLOAD = Payload(tuple(Entry(f"a{place}", "int32", (3, 4), place) for place in (64, bytes(48), HANDLE)), 512)
MESSAGES: list[tuple[str, Any]] = [
    ("start", (SETTINGS, PRINTS, ReceiverPlan(fds=(7,), gpus=(1, 0)))),
    ("done", {"proved_frac": 0.5, "notes": ["π"], "phases": {"imports": 0.25}}),
    ("publish", WeightUpdate(3, [PAYLOAD], PRINTS, [[5, 6, 7], [1, 2]])),
    ("done", ({"load": 0.25}, [[-0.5, -1.0], [-math.inf]])),
    ("score", [[5, 6, 7], [1, 2]]),
    ("generate", (REQUESTS, SAMPLING)),
    ("progress", (3, 17)),
    ("done", RESPONSES),
    ("failed", ("lone \ud800\nand \x1b[31mred", True)),
    ("sleep", 2),
    ("done", 1 << 40),
    ("abort", None),
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


def sent(pair: tuple[Channel, Channel], kind: str, body: Any) -> tuple[str, Any]:
    """Send a message from a thread, as it may exceed the socket's buffer, and return the received message."""
    sender = threading.Thread(target=pair[0].send, args=(kind, body, 100))
    sender.start()
    arrived = pair[1].poll(100)
    sender.join()
    assert arrived is not None
    return arrived


# --- what is sent arrives


def test_messages_arrive_as_they_were_sent_also_larger_than_the_socket_holds(pair) -> None:
    for kind, body in [*MESSAGES, ("done", random.Random(1).randbytes(30 << 20))]:
        assert sent(pair, kind, body) == (kind, body)


def test_messages_arrive_in_order_however_the_bytes_are_split(raw) -> None:
    here, there = raw
    stream = random.Random(14)
    messages = [stream.choice(MESSAGES) for _ in range(40)]
    frames = b"".join(map(frame, messages))
    cuts = sorted(stream.randrange(len(frames)) for _ in range(200))
    arrived = []
    for start_, end in zip([0, *cuts], [*cuts, len(frames)], strict=True):
        there.sendall(frames[start_:end])
        while (message := here.poll(0)) is not None:
            arrived.append(message)
    assert arrived == messages


# --- what is no message


class Calls:
    """Unpickling one would call a function with an argument."""

    def __init__(self, *called: Any) -> None:
        self.called = called

    def __reduce__(self) -> tuple:
        return self.called[0], self.called[1:]


def test_a_message_runs_no_code(raw, tmp_path) -> None:
    here, there = raw
    made = tmp_path / "made"
    for body in (Calls(Path.touch, made), Calls(os.system, f"touch {made}"), os.system, ValueError("an error")):
        there.sendall(frame(("done", body)))
        with pytest.raises(ChannelError, match="is not a class of a message"):
            here.poll(60)
    assert not made.exists()
    there.sendall(frame(("done", 1)))
    assert here.poll(60) == ("done", 1)


def test_a_send_that_nobody_reads_times_out_and_ends_the_channel(raw) -> None:
    here, _ = raw
    with pytest.raises(TimeoutError):
        here.send("publish", bytes(10 << 20), 0.1)
    with pytest.raises(ChannelError, match="cut off"):
        here.send("abort")


# --- a sampler that writes it


@pytest.mark.parametrize("name", ["noise", "code", "unknown"])
def test_a_sampler_that_writes_invalid_bytes_is_ended_in_one_line(start, name) -> None:  # noqa: F811
    sampler = start(f"generate rubbish {name}", timeout_s=120.0)
    begin = time.monotonic()
    with pytest.raises(SamplerFault, match="it sent an invalid answer: ") as fault:
        sampler.call("generate", ORDER, ignore)
    assert str(fault.value).isprintable() and time.monotonic() - begin < 60
    assert not fake_sampler.alive(sampler.pid)
