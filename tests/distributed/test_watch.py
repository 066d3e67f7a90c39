"""The watch thread of a rank, without the rank."""

import errno
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qarl.cli.launch import Launched
from qarl.distributed.fault import Fault
from qarl.distributed.key_value_store import DirectoryStore
from qarl.distributed.watch import Watch


class Disk(DirectoryStore):
    """full: Number of further posts to refuse."""

    full = 0

    def post(self, name: str, text: str) -> None:
        if self.full > 0:
            self.full -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        super().post(name, text)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[Disk, Watch]]:
    store = Disk(tmp_path / "rendezvous")
    (tmp_path / "rendezvous").mkdir()
    watch = Watch(store, 0, 2, 4, lambda fault: None)
    watch.start()
    yield store, watch
    watch.stop()


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 15
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_disk_that_is_full_for_a_moment_ends_no_run(watched, tmp_path: Path) -> None:
    store, watch = watched
    sign = lambda: (tmp_path / "rendezvous" / "sign-0").read_text()  # noqa: E731
    store.full = 2
    until(lambda: store.full == 0)
    before = sign()
    until(lambda: sign() != before)
    assert watch.fault is None


def test_a_directory_that_is_gone_ends_the_run(watched, tmp_path: Path) -> None:
    _, watch = watched
    shutil.rmtree(tmp_path / "rendezvous")
    until(lambda: watch.fault is not None)
    assert watch.fault.line == "the ranks' key-value store is gone (FileNotFoundError)"


def test_an_error_of_all_other_ranks_names_its_rank(tmp_path, monkeypatch, capsys):
    """The launcher has killed rank 2, which has no exit record."""
    monkeypatch.setattr(Launched, "_start", lambda *_: None)
    launched = Launched([], 3, tmp_path, tmp_path)
    launched.codes = {0: 2, 1: 2}
    launched.faults = {rank: Fault(rank, "here", 2, "no such file") for rank in (0, 1)}
    for rank, fault in launched.faults.items():
        DirectoryStore(tmp_path).post(f"end-{rank}", fault.text())
    assert launched.conclude() == 2
    assert capsys.readouterr().err == "error: rank 0: no such file\n"
