"""A vLLM of one process: torch's groups work without listening sockets, and compiled code stays private."""

import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from listening import listening

from qarl.rollout.vllm.sandbox import (
    INDUCTOR,
    close_sockets,
    keep_compiled_code_private,
    listening_sockets,
    without_listening_sockets,
)


@pytest.fixture(autouse=True)
def _no_groups() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_groups_of_one_work_and_nothing_listens() -> None:
    before = listening(os.getpid())
    with without_listening_sockets("gloo"):
        groups = [dist.new_group([0], backend="gloo") for _ in range(3)]
        assert listening(os.getpid()) == before  # at once, not only when vLLM has started
    assert listening(os.getpid()) == before
    assert dist.new_group.__name__ == "new_group"
    for group in (None, *groups):
        values, gathered = torch.arange(3.0), [torch.zeros(3)]
        dist.all_reduce(values, group=group)
        dist.all_gather(gathered, values, group=group)
        dist.broadcast(values, 0, group=group)
        dist.barrier(group=group)
        assert torch.equal(gathered[0], torch.arange(3.0)) and torch.equal(values, torch.arange(3.0))
    begin = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - begin < 0.2  # no thread spins on what was closed
    dist.destroy_process_group()
    with without_listening_sockets("gloo"):  # as a second run in one process
        dist.barrier()


def test_only_new_listening_sockets_are_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as users:
        before = set(listening_sockets())
        assert users.fileno() in {fd for fd, _ in before}
        opened = socket.create_server(("127.0.0.1", 0))
        address = opened.getsockname()
        close_sockets(before)
        with socket.socket() as caller, pytest.raises(ConnectionRefusedError):
            caller.connect(address)
        assert opened.detach() > 0  # its number is still taken, until who opened it closes it
        with socket.socket() as caller:
            caller.connect(users.getsockname())


# --- compiled code


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "shared"))
    (tmp_path / "shared").mkdir()
    monkeypatch.delenv(INDUCTOR, raising=False)
    return tmp_path


@pytest.mark.parametrize(("umask", "torchs"), [(0o077, False), (0o000, True)])
def test_compiled_code_is_in_a_directory_that_no_other_user_can_write(
    places: Path, monkeypatch, umask: int, torchs: bool
) -> None:
    if torchs:  # what torch set itself
        monkeypatch.setenv(INDUCTOR, str(places / "shared" / "torchinductor_somebody"))
    before = os.umask(umask)
    try:
        keep_compiled_code_private()
    finally:
        os.umask(before)
    chosen = Path(os.environ[INDUCTOR])
    assert chosen == places / "cache" / "qarl" / "inductor"
    assert all(stat.S_IMODE(folder.stat().st_mode) == 0o700 for folder in (chosen, chosen.parent))


def test_a_directory_that_the_user_chose_stays(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for chosen in (places / "own", places / "shared" / "own"):
        monkeypatch.setenv(INDUCTOR, str(chosen))
        keep_compiled_code_private()
        assert os.environ[INDUCTOR] == str(chosen)


def test_a_cache_that_is_a_link_is_not_used(places: Path) -> None:
    (places / "elsewhere").mkdir()
    (places / "cache").mkdir()
    (places / "cache" / "qarl").symlink_to("../elsewhere")
    keep_compiled_code_private()
    chosen = Path(os.environ[INDUCTOR])
    assert chosen.parent == places / "shared" and stat.S_IMODE(chosen.stat().st_mode) == 0o700
