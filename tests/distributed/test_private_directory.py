"""The rendezvous directory of ranks: when it is removed, and by whom."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from qarl.cli.private_directory import rendezvous_directory


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_directory_lasts_as_long_as_its_launcher(temporary: Path) -> None:
    with rendezvous_directory() as (folder, _), rendezvous_directory() as (other, _):
        assert folder.stat().st_mode & 0o777 == 0o700
        assert sorted(temporary.iterdir()) == sorted([folder, other])
    assert list(temporary.iterdir()) == []


def test_a_directory_stays_while_a_rank_of_a_killed_launcher_lives(temporary: Path) -> None:
    script = (
        "import os, subprocess, sys, tempfile; from qarl.cli.private_directory import rendezvous_directory;"
        f"tempfile.tempdir = {str(temporary)!r}; held = rendezvous_directory(); folder, inherited = held.__enter__();"
        "rank = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL, pass_fds=inherited);"
        "print(folder, rank.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    said = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True).stdout
    folder, rank = said.split()
    with rendezvous_directory():
        assert Path(folder).is_dir()
    os.kill(int(rank), 9)
    end = time.monotonic() + 60
    while Path(folder).exists() and time.monotonic() < end:  # until the rank has let go of what it held
        with rendezvous_directory():
            time.sleep(0.01)
    assert not Path(folder).exists()
