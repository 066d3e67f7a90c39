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


def test_gloo_listens_by_default() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert any(name.startswith("tcp") for name in listening(os.getpid()))


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_only_new_listening_sockets_are_closed(family: int) -> None:
    loopback = "127.0.0.1" if family == socket.AF_INET else "::1"
    try:
        users = socket.create_server((loopback, 0), family=family)
    except OSError:
        pytest.skip("no IPv6 here")
    with users, socket.socket(family) as idle, socket.socketpair()[0] as pair, open(os.devnull) as file:
        before = set(listening_sockets())
        assert users.fileno() in {fd for fd, _ in before}
        opened = socket.create_server((loopback, 0), family=family)
        address = opened.getsockname()
        close_sockets(before)
        with socket.socket(family) as caller, pytest.raises(ConnectionRefusedError):
            caller.connect(address)
        assert opened.detach() > 0  # its number is still taken, until who opened it closes it
        with socket.socket(family) as caller:
            caller.connect(users.getsockname())
        for fd in (idle.fileno(), pair.fileno(), file.fileno()):
            os.fstat(fd)


# --- compiled code


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "shared"))
    (tmp_path / "shared").mkdir()
    monkeypatch.delenv(INDUCTOR, raising=False)
    return tmp_path


@pytest.mark.parametrize(("umask", "torchs"), [(0o077, False), (0o022, True), (0o002, False), (0o000, True)])
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


def _link(cache: Path) -> None:
    (cache.parent / "elsewhere").mkdir()
    cache.mkdir()
    (cache / "qarl").symlink_to("../elsewhere")


def _file(cache: Path) -> None:
    cache.mkdir()
    (cache / "qarl").touch()


def _of_another(cache: Path) -> None:
    (cache / "qarl" / "inductor").mkdir(parents=True)
    os.chown(cache / "qarl" / "inductor", 65534, 65534)


@pytest.mark.parametrize("make", [_link, _file, _of_another])
def test_a_cache_that_is_not_the_users_own_directory_is_not_used(places: Path, make) -> None:
    if make is _of_another and os.geteuid() != 0:
        pytest.skip("only root makes directories of other users")
    make(places / "cache")
    keep_compiled_code_private()
    chosen = Path(os.environ[INDUCTOR])
    assert chosen.parent == places / "shared" and stat.S_IMODE(chosen.stat().st_mode) == 0o700
