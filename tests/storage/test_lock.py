"""Anything in place of a lock file is neither followed, changed nor waited for, and the error is one line."""

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


def link_to_precious(lock: Path) -> None:
    (lock.parent / "precious").write_bytes(PRECIOUS)
    lock.symlink_to("precious")


# What to put there; the last two can be locked.
KINDS: list[Callable[[Path], object]] = [link_to_precious, Path.mkdir]
KINDS += [os.mkfifo, lambda lock: lock.write_bytes(PRECIOUS)]


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


@pytest.mark.parametrize("make", KINDS, ids=range(len(KINDS)))
def test_what_is_no_lock_file_is_neither_changed_nor_waited_for(tmp_path: Path, make) -> None:
    make(tmp_path / ".lock")
    before, descriptors = contents(tmp_path), len(os.listdir("/proc/self/fd"))
    assert not is_locked(tmp_path)
    if make in KINDS[-2:]:
        with locked(tmp_path):
            assert is_locked(tmp_path)
            if make is KINDS[-1]:
                with pytest.raises(UserError, match="in use by another process; wait for it"):
                    take_lock(tmp_path, "in use by {holder}; wait for it")
    else:
        with pytest.raises(UserError, match=r"cannot be written: \w.*; ") as refused, locked(tmp_path):
            pass
        assert "\n" not in str(refused.value)
    assert contents(tmp_path) == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


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
