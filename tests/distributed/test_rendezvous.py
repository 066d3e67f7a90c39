"""Launches without `--nproc` that cannot work: one line that names what is wrong, within the timeout."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
import torch

from qarl.distributed.group import Group
from qarl.distributed.rank_info import MOST_RANKS, RankInfo, rank_info
from qarl.distributed.rendezvous import Rendezvous
from qarl.errors import UserError

# --- environments

LAUNCHED = {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}
JUNK = ("junk", "-1", "1.5", "0x1", " 1", "٣", "9" * 5000)
# Changes of LAUNCHED -> the variable that is wrong.
WRONG = [
    *(({name: text}, name) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT") for text in JUNK),
    *(({"WORLD_SIZE": text}, "WORLD_SIZE") for text in ("0", str(MOST_RANKS + 1))),
    *(({"RANK": text}, "WORLD_SIZE") for text in (None, "")),
    *(({name: text}, name) for name in ("RANK", "LOCAL_RANK") for text in ("4", "5")),
    ({"WORLD_SIZE": "1"}, "RANK"),
    *(({"MASTER_ADDR": text}, "MASTER_ADDR") for text in (None, "", "a b", "http://h")),
    *(({"MASTER_PORT": text}, "MASTER_PORT") for text in (None, "", "0", "65536")),
    ({"QARL_RANKS": "/no/such/directory"}, "QARL_RANKS"),
]
RIGHT: list[tuple[dict[str, str | None], RankInfo | None]] = [
    ({}, RankInfo(1, 4, 1, None, ("h", 29500))),
    ({"WORLD_SIZE": str(MOST_RANKS)}, RankInfo(1, MOST_RANKS, 1, None, ("h", 29500))),
    ({"RANK": "3", "LOCAL_RANK": "3", "MASTER_PORT": "65535"}, RankInfo(3, 4, 3, None, ("h", 65535))),
    ({"LOCAL_RANK": None}, RankInfo(1, 4, 0, None, ("h", 29500))),
    *(({"MASTER_ADDR": h}, RankInfo(1, 4, 1, None, (h, 29500))) for h in ("127.0.0.1", "::1", "node-1.cluster")),
    ({"QARL_RANKS": ""}, RankInfo(1, 4, 1, None, ("h", 29500))),
    ({"QARL_RANKS": "/", "MASTER_ADDR": None}, RankInfo(1, 4, 1, Path("/"))),
    *(({"WORLD_SIZE": text}, None) for text in (None, "")),
    ({"WORLD_SIZE": None, "RANK": "5", "MASTER_PORT": "junk"}, None),
    ({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "junk", "MASTER_ADDR": None}, None),
]


def test_an_environment_gives_a_rank_or_one_line_that_names_the_variable() -> None:
    def of(changes: dict[str, str | None]) -> RankInfo | None:
        return rank_info({name: text for name, text in (LAUNCHED | changes).items() if text is not None})

    for changes, name in WRONG:
        with pytest.raises(UserError) as refused:
            of(changes)
        assert str(refused.value).startswith(f"{name}: ") and "\n" not in str(refused.value), changes
    for changes, info in RIGHT:
        assert of(changes) == info, changes


# --- listeners

TIMEOUT_S = 0.5


@contextmanager
def listener(answer: Callable[[socket.socket], object] | None) -> Iterator[int]:
    """The port of a program that is not a store. answer: Called with each connection; None to accept none."""
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection = stack.enter_context(server.accept()[0])
                    answer(connection)
                except OSError:
                    return

        if answer is not None:
            threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return server.getsockname()[1]


@contextmanager
def nobody() -> Iterator[int]:
    yield free_port()


LISTENERS: dict[str, tuple[Callable, str]] = {
    "mute, does not accept": (lambda: listener(None), "did not answer as torch's store"),
    "talks": (lambda: listener(lambda connection: connection.sendall(b"SSH-2.0-x\r\n" * 99)), ""),
    "nobody": (nobody, "cannot be reached within"),
}


@pytest.mark.parametrize("kind", LISTENERS)
def test_a_rank_without_a_store_fails_in_time(kind: str) -> None:
    opened, said = LISTENERS[kind]
    with opened() as port:
        began = time.monotonic()
        with pytest.raises(UserError, match=rf"^MASTER_ADDR, MASTER_PORT: rank 1 of 2: 127\.0\.0\.1:{port} .*{said}"):
            Rendezvous(RankInfo(1, 2, 1, None, ("127.0.0.1", port))).store(TIMEOUT_S)
        assert time.monotonic() - began < TIMEOUT_S + 1


def test_the_first_rank_does_not_take_the_port_of_another_program() -> None:
    with listener(lambda connection: None) as port, pytest.raises(UserError, match=f"127.0.0.1:{port} is in use: "):
        Rendezvous(RankInfo(0, 2, 0, None, ("127.0.0.1", port))).store(60)


def test_a_missing_rank_is_named_in_time() -> None:
    began = time.monotonic()
    with pytest.raises(
        UserError, match=r"^rank 1 of 3: has not started within 0.5 s \(distributed.timeout_s\) of rank 0"
    ):
        Group(Rendezvous(RankInfo(0, 3, 0, None, ("127.0.0.1", free_port()))), torch.device("cpu"), 0.5)
    assert time.monotonic() - began < 4


def test_a_second_process_of_the_same_rank_is_refused() -> None:
    """The second one is refused, and the first one goes on waiting for the rank that is missing."""
    port = free_port()
    store = Rendezvous(RankInfo(0, 3, 0, None, ("127.0.0.1", port))).store(5)
    first, second = (Rendezvous(RankInfo(1, 3, 1, None, ("127.0.0.1", port))) for _ in range(2))
    second._run = first._run  # which is in one process here
    with pytest.raises(UserError, match=r"^rank 0 of 3: has not started"):
        Group(first, torch.device("cpu"), 0.5)
    with pytest.raises(UserError, match=r"^RANK: 1: another process of the 3 ranks has it too"):
        Group(second, torch.device("cpu"), 0.5)
    del store
