"""Converted models in the cache: which entries are used, which are made again, and what happens if none can be kept."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from full_disk import fill_disk

from qarl.inputs import files
from qarl.storage import conversions as module
from qarl.storage.conversions import converted


class Kept:
    """A source file whose conversion is its text in capitals. reads: the number of conversions."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.source, self.reads = root, folder / "source.gguf", 0
        self.source.write_text("weights")

    def convert(self, part: str = "model", versions: dict[str, str] | None = None, size: int = 100) -> Path | None:
        def read() -> str:
            self.reads += 1
            return self.source.read_text().upper()

        def write(value: str, directory: Path) -> None:
            (directory / "a.json").write_text(value)
            (directory / "b.bin").write_bytes(b"\0" * 5000)

        return converted(self.source, part, versions or {"x": "1"}, read, write, size)

    def fresh(self) -> None:
        """Forget what this process knows, as a new process would."""
        files._digests.clear()
        module._logged.clear()


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Kept:
    monkeypatch.setenv("QARL_CACHE", str(tmp_path / "cache"))
    found = Kept(tmp_path / "cache" / "models", tmp_path)
    found.fresh()
    return found


def test_a_source_is_converted_once_for_this_user_alone(kept):
    first = kept.convert()
    kept.fresh()
    assert kept.convert() == first and first.parent == kept.root and kept.reads == 1
    assert (first / "a.json").read_text() == "WEIGHTS"
    assert [path.name for path in kept.root.iterdir()] == [first.name]  # nothing temporary
    assert kept.root.stat().st_mode & 0o777 == first.stat().st_mode & 0o777 == 0o700


def test_another_source_part_or_version_is_another_entry(kept):
    entries = {kept.convert(), kept.convert(part="config"), kept.convert(versions={"x": "2"})}
    kept.source.write_text("Weights")  # the same length
    os.utime(kept.source, ns=(0, 0))
    entries.add(kept.convert())
    assert len(entries) == kept.reads == 4


# --- damaged entries


def flip(entry: Path) -> None:
    data = bytearray((entry / "b.bin").read_bytes())
    data[4321] ^= 1
    (entry / "b.bin").write_bytes(data)


DAMAGES: list[Callable[[Path], None]] = [
    flip,
    lambda entry: (entry / "a.json").unlink(),
    lambda entry: (entry / "manifest.json").unlink(),
    lambda entry: (shutil.rmtree(entry), entry.write_text("a file")),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=range(len(DAMAGES)))
def test_a_damaged_entry_is_made_again(kept, damage):
    entry = kept.convert()
    damage(entry)
    assert kept.convert() == entry and kept.reads == 2
    assert (entry / "a.json").read_text() == "WEIGHTS" and (entry / "b.bin").read_bytes() == b"\0" * 5000
    assert sorted(path.name for path in entry.iterdir()) == ["a.json", "b.bin", "manifest.json"]
    kept.fresh()
    assert kept.convert() == entry and kept.reads == 2


# --- nothing can be kept


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_full_disk_is_reported_once_and_leaves_nothing(kept, monkeypatch, caplog):
    fill_disk(monkeypatch)
    assert kept.convert() is None and kept.convert() is None
    assert len(warnings(caplog)) == 1 and "No space left" in warnings(caplog)[0].replace("no space", "No space")
    assert "QARL_CACHE" in warnings(caplog)[0] and list(kept.root.iterdir()) == []


def test_nothing_is_converted_if_the_disk_has_no_space(kept, monkeypatch, caplog):
    monkeypatch.setattr("qarl.storage.disk.free_bytes", lambda path: module.SPARE_BYTES + 99)
    assert kept.convert(size=100) is None and kept.reads == 0
    assert f"{module.SPARE_BYTES + 100:,} bytes needed" in warnings(caplog)[0]
    assert kept.convert(size=99) is not None


def test_a_directory_that_others_can_write_is_not_used(kept, caplog, monkeypatch):
    kept.convert()
    kept.root.chmod(0o770)
    assert kept.convert() is None and "other users may write it" in warnings(caplog)[0]
    kept.root.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(kept.root, 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert kept.convert() is None and kept.reads == 1


# --- several processes


PROCESS = """
import sys, time
from pathlib import Path
from qarl.storage.conversions import converted
source, go = Path(sys.argv[1]), Path(sys.argv[2])
print("ready", flush=True)
while not go.exists():
    time.sleep(0.001)
def write(value, directory):
    (directory / "a.bin").write_bytes(value * 3_000_000)
entry = converted(source, "model", {}, lambda: b"z", write, 0)
assert (entry / "a.bin").read_bytes() == b"z" * 3_000_000
print(entry)
"""


def test_processes_that_convert_at_the_same_time_end_with_one_entry(kept, tmp_path):
    command = [sys.executable, "-c", PROCESS, str(kept.source), str(tmp_path / "go")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    (tmp_path / "go").touch()
    said = [process.communicate(timeout=60) for process in processes]
    assert {process.returncode for process in processes} == {0}, said
    assert len({out for out, _ in said}) == 1 and {err for _, err in said} == {""}
    assert len(list(kept.root.iterdir())) == 1


def test_the_next_conversion_removes_what_a_killed_one_left(kept):
    kept.root.mkdir(parents=True, mode=0o700)
    dead = subprocess.Popen(["true"])
    dead.wait()
    left, live = (kept.root / f".tmp-{'0' * 64}-{pid}-{socket.gethostname()}" for pid in (dead.pid, os.getppid()))
    for directory in (left, live):
        directory.mkdir()
        (directory / "part").write_text("x")
    kept.convert()
    assert not left.exists() and live.exists()
