"""`qarl train` on real ranks: how they end when one of them fails, hangs, is killed, or the user stops them."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from forks import Fork
from process_tree import runs

CONFIG = """\
model: {path: MODEL, device: cpu}
quant: {group_size: 32}
data: {source: "task:arithmetic", max_prompt_length: 64}
rollout: {max_response_length: 64}
reward: {functions: [{name: exact}]}
train: {steps: 3}
distributed: {timeout_s: 60}
"""
MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 1024,
}
QARL = str(Path(__file__).parent / "fake_loop.py")
TORCHRUN = ["torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
TORCHRUN += ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", QARL, "train"]  # on a port that is free
LIMIT_S = 180
HANGS = ("stop", "hang", "late")


class Run:
    """A start of fake_loop.py in a directory of its own, in a fork: `qarl train --nproc`.

    forked: Its ranks are forks of it; otherwise they start as a user's do. command: Program and arguments of another
    command.
    """

    def __init__(
        self, folder: Path, fault: str, *command: str, device: str = "cpu", count: int = 3, forked: bool = True
    ) -> None:
        self.folder, self.out, self._pids = folder, folder / "run", []
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(MODEL))
        config = CONFIG.replace("MODEL", "model").replace("device: cpu", f"device: {device}")
        if fault.startswith((*HANGS, "unseen")):  # the others are not waited for
            config = config.replace("timeout_s: 60", "timeout_s: 4")
        (folder / "tiny.yaml").write_text(config)
        self._count = count
        environment = {**os.environ, "FAULT": fault, "FORKED": "1" if forked else ""}
        program, *argv = command or (QARL, "train", "--nproc", str(count))
        order = {"program": program, "argv": [*argv, "tiny.yaml", "train.run_dir=run"], "cwd": str(folder)}
        self._err = folder / "stderr"
        self.process = Fork("fork_server", folder / "stdout", self._err, environment, **order)

    def begun(self) -> list[int]:
        """The ranks' pids, once all are there."""
        if self._pids:
            return self._pids
        end, ended = time.monotonic() + LIMIT_S, False
        while time.monotonic() < end and not ended:
            ended = self.process.poll() is not None  # before looking: a run may be over when it is first looked at
            pids = [int(text) for path in sorted(self.out.glob("pid-*")) if (text := path.read_text())]
            if len(pids) == self._count:
                self._pids = pids
                return pids
            time.sleep(0.02)
        raise AssertionError(f"did not begin: {self._err.read_text()}")

    def end(self) -> tuple[int, str]:
        """(exit code, stderr). Afterwards no rank is left."""
        pids = self.begun()
        try:
            self.process.wait(LIMIT_S)
        finally:
            self.process.kill()
            said = self._err.read_text(errors="replace")
            left = [pid for pid in pids if runs(pid)]
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        assert left == [], said
        return self.process.returncode, said

    @property
    def fault(self) -> dict | None:
        path = self.out / "fault.json"
        return json.loads(path.read_text()) if path.exists() and path.stat().st_size else None


def nproc(folder: Path, fault: str, count: int = 2) -> Run:
    return Run(folder, fault, count=count)


def errors(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("error: ")]


FAULTS = {  # fault -> exit code, rank, code and line in fault.json, the error's lines
    "tensors 2": (137, 2, 137, "was ended by SIGKILL", ["error: rank 2: was ended by SIGKILL, perhaps for"]),
    "stop 1": (75, 1, None, "gave no sign of life for", ["error: rank 1: gave no sign of life for"]),
    "hang 1": (75, 1, None, "did not reach", ["error: rank 1: did not reach a collective; the others waited 4"]),
    "agree 1": (2, 1, 2, "all know of it", ["error: rank 1: all know of it"]),
    "exit 1": (1, 1, 1, "ended with exit code 0", ["error: rank 1: ended with exit code 0 before the end of the run"]),
    "bug 1": (70, 1, 70, "nobody foresaw", ["error: rank 1: internal error: KeyError: 'nobody foresaw'"]),
}


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The runs of FAULTS that end by a timeout: one starts after the other, and they wait at the same time."""
    runs = {}
    for fault in FAULTS:
        if fault.startswith(HANGS):
            runs[fault] = nproc(tmp_path_factory.mktemp("hanging"), fault)
            runs[fault].begun()
    return runs


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_rank_ends_all_and_names_it(tmp_path: Path, hanging: dict[str, Run], fault: str) -> None:
    run = hanging.get(fault) or nproc(tmp_path, fault, 3 if fault.endswith("2") else 2)
    run.begun()
    began = time.monotonic()
    code, said = run.end()
    took = time.monotonic() - began
    expected, rank, of, line, lines = FAULTS[fault]
    assert code == expected, said
    assert run.fault is not None, said
    assert (run.fault["rank"], run.fault["code"], run.fault["host"]) == (rank, of, socket.gethostname()), run.fault
    assert line in run.fault["line"]
    assert len(errors(said)) == len(lines), said
    assert all(found.startswith(start) for found, start in zip(errors(said), lines, strict=True)), said
    assert "Traceback" not in said
    assert ("in train" in said and "its stack is above" in said) == (fault == "hang 1"), said
    assert took < 90


def test_the_exit_of_a_rank_replaces_its_missed_heartbeat_as_the_cause(tmp_path: Path) -> None:
    run = nproc(tmp_path, "unseen 1")
    run.begun()
    end = time.monotonic() + LIMIT_S
    while run.fault is None:
        assert time.monotonic() < end, "the other rank waits"
        time.sleep(0.02)
    assert "gave no sign of life" in run.fault["line"]
    run.process.send_signal(signal.SIGCONT)
    code, said = run.end()
    assert (code, run.fault["rank"], run.fault["code"]) == (137, 1, 137)
    assert "was ended by SIGKILL" in run.fault["line"] and "was ended by SIGKILL" in errors(said)[0]


def test_ctrl_c_stops_all_ranks_at_a_safe_point(tmp_path: Path) -> None:
    run = Run(tmp_path, "", count=2, forked=False)
    run.begun()
    run.process.send_signal(signal.SIGINT)
    code, said = run.end()
    assert (code, errors(said), run.fault) == (130, [], None)


def test_a_second_ctrl_c_ends_ranks_that_ignore_signals(tmp_path: Path) -> None:
    run = nproc(tmp_path, "deaf 1")
    run.begun()
    heard = tmp_path / "heard-1"
    await_that(heard.exists)
    run.process.send_signal(signal.SIGINT)
    await_that(lambda: heard.stat().st_size > 0)  # it was passed on: two that wait at the same time are one
    run.process.send_signal(signal.SIGINT)
    code, said = run.end()
    assert (code, errors(said)) == (130, [])


def await_that(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_ranks_stop_when_their_launcher_is_gone_and_the_next_one_removes_what_it_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temporary := tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    for name in ("killed", "next"):
        (tmp_path / name).mkdir()
    run = nproc(tmp_path / "killed", "")
    pids = run.begun()
    (left,) = temporary.glob("qarl-ranks-*")
    assert left.is_dir()
    run.process.kill()
    end = time.monotonic() + 90
    while any(runs(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert run.end()[0] == -signal.SIGKILL
    following = nproc(tmp_path / "next", "end")
    assert following.end() == (0, "") and following.fault is None
    assert {path.name: path.read_text() for path in following.out.glob("rank-*")} == {
        "rank-001.log": "rank 1 of 2 has begun\n"
    }
    assert list(temporary.iterdir()) == []


def test_under_torchrun(tmp_path: Path) -> None:
    run = Run(tmp_path, "user 1", "-m", *TORCHRUN, count=2)
    code, said = run.end()
    assert code == 1, said  # torchrun's own
    assert run.fault is not None and (run.fault["rank"], run.fault["code"]) == (1, 2), said
    assert "error: reward.functions: `x.py:f`: is broken" in said
