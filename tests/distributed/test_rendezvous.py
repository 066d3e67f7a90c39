"""Launches without `--nproc` that cannot work: one line that names what is wrong, within the timeout."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qarl.distributed.group import Group
from qarl.distributed.rank_info import MOST_RANKS, RankInfo, rank_info
from qarl.distributed.rendezvous import Rendezvous
from qarl.errors import UserError

# --- environments

JUNK = ("junk", "-1", "1.5", "0x1", "1e3", " 1", "1\n2", "٣", "9" * 30, "\udcff", "nan", "None", "--", "1,2")
NUMBERS = tuple(str(number) for number in (0, 1, 2, 3, 8, 65535, 65536, 99999, 10**8))
HOSTS = ("127.0.0.1", "localhost", "::1", "node-1.cluster", "a b", "h/x", "x" * 64, "http://h", "\udcff", " ")


def maybe(*values: str) -> st.SearchStrategy[str | None]:
    return st.sampled_from((None, "", *values))


ENVIRONMENTS = st.fixed_dictionaries(
    {
        "WORLD_SIZE": st.one_of(st.sampled_from(("2", "4")), maybe(*NUMBERS, *JUNK)),
        "RANK": st.one_of(st.sampled_from(("0", "1")), maybe(*NUMBERS, *JUNK)),
        "LOCAL_RANK": st.one_of(st.sampled_from(("0", "1")), maybe(*NUMBERS, *JUNK)),
        "MASTER_ADDR": maybe(*HOSTS),
        "MASTER_PORT": st.one_of(st.just("29500"), maybe(*NUMBERS, *JUNK)),
        "QARL_RANKS": st.sampled_from((None, None, "", "/", "/no/such/directory")),
    }
).map(lambda environment: {name: value for name, value in environment.items() if value is not None})


def number(text: str | None, default: int) -> int | None:
    """What a launcher's variable says, None for a text that is no small number."""
    if not text:
        return default
    return int(text) if text in (*NUMBERS, "4", "29500") else None


def expected(environment: dict[str, str]) -> RankInfo | str | None:
    """The place that an environment says, or the variable that is wrong."""
    if not environment.get("WORLD_SIZE"):
        return None
    count = number(environment["WORLD_SIZE"], 1)
    if count is None or not 1 <= count <= MOST_RANKS:
        return "WORLD_SIZE"
    if count > 1 and not environment.get("RANK"):
        return "WORLD_SIZE"
    rank, local = number(environment.get("RANK"), 0), number(environment.get("LOCAL_RANK"), 0)
    if rank is None or rank >= count:
        return "RANK"
    if count == 1:
        return None
    if local is None or local >= count:
        return "LOCAL_RANK"
    if folder := environment.get("QARL_RANKS"):
        return RankInfo(rank, count, local, Path(folder)) if folder == "/" else "QARL_RANKS"
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if not host or (port and host not in HOSTS[:4]):
        return "MASTER_ADDR"
    if not port or (value := number(port, 0)) is None or not 1 <= value <= 65535:
        return "MASTER_PORT"
    return RankInfo(rank, count, local, None, (host, value))


@given(environment=ENVIRONMENTS)
@settings(max_examples=400, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_any_environment_is_a_place_or_one_line_that_names_the_variable(environment: dict[str, str]) -> None:
    wanted = expected(environment)
    if not isinstance(wanted, str):
        assert rank_info(environment) == wanted
        return
    with pytest.raises(UserError) as refused:
        rank_info(environment)
    assert str(refused.value).startswith(f"{wanted}: ") and "\n" not in str(refused.value)


# --- listeners

TIMEOUT_S = 0.5


@contextmanager
def listener(answer: Callable[[socket.socket], object] | None) -> Iterator[int]:
    """The port of a program that is no store. answer: called with each connection; None: accepts none."""
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
    "mute, accepts": (lambda: listener(lambda connection: None), "did not answer as torch's store"),
    "mute, does not accept": (lambda: listener(None), "did not answer as torch's store"),
    "closes": (lambda: listener(lambda connection: connection.close()), ""),
    "talks": (lambda: listener(lambda connection: connection.sendall(b"SSH-2.0-x\r\n" * 99)), ""),
    "nobody": (nobody, "cannot be reached within"),
}


@pytest.mark.parametrize("kind", LISTENERS)
def test_a_rank_that_finds_no_store_says_so_in_time(kind: str) -> None:
    opened, said = LISTENERS[kind]
    with opened() as port:
        began = time.monotonic()
        with pytest.raises(UserError, match=rf"^MASTER_ADDR, MASTER_PORT: rank 1 of 2: 127\.0\.0\.1:{port} .*{said}"):
            Rendezvous(RankInfo(1, 2, 1, None, ("127.0.0.1", port))).store(TIMEOUT_S)
        assert time.monotonic() - began < TIMEOUT_S + 1


def test_the_first_rank_does_not_take_the_port_of_another_program() -> None:
    with listener(lambda connection: None) as port, pytest.raises(UserError, match=f"127.0.0.1:{port} is in use: "):
        Rendezvous(RankInfo(0, 2, 0, None, ("127.0.0.1", port))).store(60)


def test_a_host_that_nobody_knows_is_one_line() -> None:
    with pytest.raises(UserError, match=r"no.such.host.invalid:1 cannot be reached within"):
        Rendezvous(RankInfo(1, 2, 1, None, ("no.such.host.invalid", 1))).store(0.5)


def test_a_rank_that_never_comes_is_named_in_time() -> None:
    began = time.monotonic()
    with pytest.raises(
        UserError, match=r"^rank 1 of 3: has not started within 0.5 s \(distributed.timeout_s\) of rank 0"
    ):
        Group(Rendezvous(RankInfo(0, 3, 0, None, ("127.0.0.1", free_port()))), torch.device("cpu"), 0.5)
    assert time.monotonic() - began < 4


def test_two_processes_of_one_rank_are_told_apart() -> None:
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


@pytest.mark.slow
def test_a_real_launch_whose_second_rank_never_comes_is_one_line(tmp_path: Path) -> None:
    from test_ranks_launch import QARL, Run

    port = str(free_port())
    environment = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        run = Run(tmp_path, "hang", *QARL, "train", count=1)
        _, said = run.process.communicate(timeout=60)
    assert run.process.returncode == 2, said
    assert said.startswith("error: rank 1 of 2: has not started within 4 s (distributed.timeout_s)"), said
    assert said.count("\n") == 1, said
