"""Anything in place of a lock file is neither followed, changed nor waited for, and the error is one line."""

import fcntl
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qarl.comparison.start_members import locked
from qarl.errors import UserError
from qarl.exporting.staging import staged
from qarl.storage.lock import is_locked, release_lock, take_lock

PRECIOUS = b"process 1 was here\nand years of work\n"
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices and files of other users")


def link_to_precious(lock: Path) -> None:
    (lock.parent / "precious").write_bytes(PRECIOUS)
    lock.symlink_to("precious")


def link_to_a_link(lock: Path) -> None:
    link_to_precious(lock.parent / "another")
    lock.symlink_to("another")


def socket_file(lock: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(lock))


def of_another_user(lock: Path) -> None:
    lock.write_bytes(PRECIOUS)
    os.chown(lock, 65534, 65534)


# What to put there -> how the error names it.
KINDS: dict[Callable[[Path], object], str] = {
    **dict.fromkeys((link_to_precious, link_to_a_link), "a symbolic link"),
    **{lambda lock, to=to: lock.symlink_to(to): "a symbolic link" for to in ("nothing", ".lock", ".")},
    **{Path.mkdir: "a directory", os.mkfifo: "a FIFO", socket_file: "a socket"},
}
ROOTS: dict[Callable[[Path], object], str] = {
    of_another_user: "a file of user 65534",
    lambda lock: os.mknod(lock, 0o020666, os.makedev(1, 3)): "a device",
}
LOCKERS: list[Callable[[Path], object]] = [
    lambda folder: take_lock(folder, "in use"),
    lambda folder: locked(folder).__enter__(),
]


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    """Fail a test that waits for the other end of a FIFO."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(100)
    yield
    signal.alarm(0)


def contents(folder: Path) -> dict[str, object]:
    return {
        entry.name: (entry.lstat().st_mode, entry.read_bytes() if entry.is_file() else None)
        for entry in folder.iterdir()
    }


@pytest.mark.parametrize("locker", LOCKERS, ids=["train and eval", "compare"])
@pytest.mark.parametrize(
    ("make", "kind"),
    [*KINDS.items(), *(pytest.param(*item, marks=ROOT_ONLY) for item in ROOTS.items())],
    ids=[*KINDS.values(), *ROOTS.values()],
)
def test_what_is_no_lock_file_is_refused_in_one_line_and_unchanged(tmp_path: Path, make, kind, locker) -> None:
    make(tmp_path / ".lock")
    before, descriptors = contents(tmp_path), len(os.listdir("/proc/self/fd"))
    with pytest.raises(UserError) as refused:
        locker(tmp_path)
    message = f"{tmp_path}/.lock: is {kind}, not a lock file of yours; remove it, or choose another directory"
    assert str(refused.value) == message
    assert contents(tmp_path) == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("make", [*KINDS, *(pytest.param(make, marks=ROOT_ONLY) for make in list(ROOTS)[1:])])
def test_testing_a_lock_neither_waits_nor_follows_links(tmp_path: Path, make) -> None:
    make(tmp_path / ".lock")
    before = contents(tmp_path)
    held = os.open(tmp_path / "precious", os.O_RDWR) if (tmp_path / "precious").exists() else None
    if held is not None:
        fcntl.flock(held, fcntl.LOCK_EX)  # the state of a link's target does not count
    assert not is_locked(tmp_path)
    assert contents(tmp_path) == before
    if held is not None:
        os.close(held)


@pytest.mark.parametrize("text", [PRECIOUS, b"{", b"process 7 on host", b"\0" * 5000, b"process x on y\n"])
def test_a_foreign_file_is_locked_and_keeps_its_contents(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "elsewhere").write_bytes(text)
    os.link(tmp_path / "elsewhere", tmp_path / ".lock")
    fd = take_lock(tmp_path, "in use")
    assert (tmp_path / "elsewhere").read_bytes() == text
    with pytest.raises(UserError, match="in use by another process; wait for it"):
        take_lock(tmp_path, "in use by {holder}; wait for it")
    release_lock(fd)


def test_a_lock_names_its_newest_holder_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_bytes(b"process 99999999 on a-host-with-a-longer-name.example.org\n")
    (tmp_path / ".lock").chmod(0o600)
    for _ in range(2):
        fd = take_lock(tmp_path, "in use")
        assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
        assert is_locked(tmp_path)
        release_lock(fd)
        assert not is_locked(tmp_path)
    (tmp_path / ".lock").unlink()
    release_lock(take_lock(tmp_path, "in use"))
    assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o600


def test_staging_an_export_does_not_empty_a_directory_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "work").write_bytes(PRECIOUS)
    (tmp_path / ".out.partial").symlink_to("precious")
    with pytest.raises(UserError, match="out: cannot be written: Not a directory"), staged(tmp_path / "out"):
        pass
    assert (tmp_path / "precious" / "work").read_bytes() == PRECIOUS
