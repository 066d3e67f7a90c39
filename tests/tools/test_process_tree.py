"""`tools/process_tree.py`: all that a process started is ended, and says where it stood."""

import os
import sys
import time
from pathlib import Path

import pytest
import traced
from process_tree import Started, runs, start, tails
from traced import run_traced

# A parent, a child that leads a session of its own and takes no SIGTERM, and what that one runs, which ends with it.
CHILD = """
import ctypes, os, signal, sys, time
def waits_for_ever():
    path = sys.argv[1] + "/" + sys.argv[2]
    open(path + ".part", "w").write(str(os.getpid()))
    os.rename(path + ".part", path)
    time.sleep(1000)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if sys.argv[2] == "child":
    import subprocess
    log = open(sys.argv[1] + "/grandchild.log", "w")
    subprocess.Popen([sys.executable, sys.argv[0], sys.argv[1], "grandchild"], start_new_session=True, stderr=log)
waits_for_ever()
"""
PARENT = """
import subprocess, sys, time
print("begun", flush=True)
subprocess.Popen([sys.executable, *sys.argv[1:]], start_new_session=True)
time.sleep(float("{}"))
"""


def all_wait(folder: Path) -> None:
    """Until child and grandchild have begun to."""
    end = time.monotonic() + 120
    while not ((folder / "child").exists() and (folder / "grandchild").exists()):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_what_takes_too_long_prints_its_stacks_and_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    def start_and_wait(*given) -> Started:  # the time begins once there is something to be ended
        started = start(*given)
        all_wait(tmp_path)
        return started

    monkeypatch.setattr(traced, "start", start_and_wait)
    (tmp_path / "child.py").write_text(CHILD)
    command = [sys.executable, "-c", PARENT.format(1000), str(tmp_path / "child.py"), str(tmp_path), "child"]
    with pytest.raises(TimeoutError) as raised:
        run_traced(command, os.environ, 0.5)
    said, pids = str(raised.value), [int((tmp_path / name).read_text()) for name in ("child", "grandchild")]
    assert "took more than 0.5 s" in said and "begun" in said and not any(map(runs, pids))
    assert "in waits_for_ever" in said and "in waits_for_ever" in tails(tmp_path)


def test_what_ends_in_time_gives_what_it_printed() -> None:
    done = run_traced([sys.executable, "-c", "import sys; print(1); sys.exit('2')"], os.environ, 60)
    assert (done.returncode, done.stdout, done.stderr) == (1, "1\n", "2\n")
