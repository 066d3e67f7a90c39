"""`tools/run_jobs.py`: exclusive GPUs, time limits, logs, and no processes left when it is stopped."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import run_jobs
import yaml

TOOL = Path(run_jobs.__file__)


def start(file: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(TOOL), str(file), "--out", str(out), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def jobs(tmp_path: Path, *entries: dict[str, Any]) -> Path:
    file = tmp_path / "jobs.yaml"
    file.write_text(yaml.safe_dump([{"seconds": 60} | entry for entry in entries]))
    return file


def test_jobs_have_gpus_of_their_own_and_their_order(tmp_path: Path) -> None:
    say = 'echo "$CUDA_VISIBLE_DEVICES" > $OUT/{0}.gpus; echo {0} begins >> $OUT/order; sleep 0.5'
    say += "; echo {0} ends >> $OUT/order"
    file = jobs(
        tmp_path,
        *({"name": name, "command": say.format(name)} for name in ("one", "other")),
        {"name": "both", "gpus": 2, "command": say.format("both")},
        {"name": "after", "command": say.format("after")},
    )
    process = start(file, tmp_path / "out", "--gpus", "3", "5")
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors

    def read(name: str) -> str:
        return (tmp_path / "out" / name).read_text().strip()

    assert {read("one.gpus"), read("other.gpus")} == {"3", "5"} and read("both.gpus") == "3,5"
    order = read("order").splitlines()
    assert set(order[:4]) == {f"{name} {what}" for name in ("one", "other") for what in ("begins", "ends")}
    assert order[4:] == ["both begins", "both ends", "after begins", "after ends"]
    assert "both: started on GPU 3,5" in said and said == (tmp_path / "out/status.txt").read_text()


def test_a_failure_and_a_limit_are_told_and_the_rest_runs(tmp_path: Path) -> None:
    file = jobs(
        tmp_path,
        {"name": "fails", "command": "echo what happened >&2; exit 3"},
        {"name": "hangs", "command": "sleep 1000 & sleep 1000", "seconds": 0.5},
        {"name": "works", "command": "echo fine"},
    )
    process = start(file, tmp_path / "out", "--gpus", "0")
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and errors.startswith("failed: fails, hangs; see ")
    assert "fails: exit code 3" in said and "hangs: exceeded its limit" in said and "works: exit code 0" in said
    assert (tmp_path / "out/fails.log").read_text() == "what happened\n"
    assert (tmp_path / "out/works.log").read_text() == "fine\n"


def test_a_signal_ends_the_jobs(tmp_path: Path) -> None:
    file = jobs(tmp_path, {"name": "long", "command": "echo $$ > $OUT/pid; exec sleep 1000"})
    process = start(file, tmp_path / "out", "--gpus", "0")
    pid = tmp_path / "out/pid"
    for _ in range(300):
        if pid.exists() and pid.read_text().strip():
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and "long: ended early" in said
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- {name: a, command: b}", "seconds\n  Field required"),
        ("- {name: a/b, command: b, seconds: 1, limit: 3}", "limit\n  Extra inputs are not permitted"),
        ("- {name: a, command: b, seconds: 1}\n- {name: a, command: c, seconds: 1}", "two jobs have one name"),
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "jobs.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=said):
        run_jobs.read_jobs(file)


def test_what_cannot_run_is_refused_before_anything_does(tmp_path: Path) -> None:
    file = jobs(tmp_path, {"name": "two", "gpus": 2, "command": "true"})
    for options, said in ((("--only", "three"), "no job is called three"), ((), "two: needs more than the 1 GPU")):
        _, errors = start(file, tmp_path / "out", "--gpus", "0", *options).communicate(timeout=60)
        assert said in errors and not (tmp_path / "out").exists()
