"""Modules that do not load, and the bounds of memory and output."""

import math
from pathlib import Path

import pytest

from qarl.config.reward import RewardConfig
from qarl.errors import UserError
from qarl.rewards import RewardPool
from qarl.rewards.log import CALL_BYTES, RewardLog
from qarl.rewards.process import Worker

MODULE = """
import os, sys
def judge(completions, prompts, **columns):
    if "bad" in completions:
        CODE
    return [99.0 if c == "bad" else float(c) for c in completions]
"""


def module(folder: Path, code: str) -> str:
    """code: what the function does when `bad` is among the completions."""
    (folder / "bounds.py").write_text(MODULE.replace("CODE", code))
    return f"{folder / 'bounds.py'}:judge"


def pool(name: str, log_path: Path | None = None, **fields) -> RewardPool:
    return RewardPool(RewardConfig(functions=[{"name": name}], **fields), [], log_path)


LOADING = {
    "os._exit": ("print('about to'); os._exit(7)", "exited with code 7; last output: about to"),
    "no exception": ("class Odd(BaseException): pass\nraise Odd('so')", "does not import: Odd: so"),
    "never": ("print('waiting for the judge')\nwhile True: pass", "no answer within 1.5 s.*: waiting for the judge"),
}


def limited_once_it_printed(worker: Worker, attend):
    """A look at a worker whose time begins to count when it has printed something, however long it took to start."""
    worker.deadline = worker.started + 1.5 if worker._output.last_line else math.inf
    return attend(worker)


@pytest.mark.parametrize("name", LOADING)
def test_a_module_that_does_not_load_says_why(tmp_path, monkeypatch, name):
    attend = Worker.attend
    if name == "never":
        monkeypatch.setattr("qarl.rewards.process.START_LIMIT_S", 1.5)
        monkeypatch.setattr(Worker, "attend", lambda worker: limited_once_it_printed(worker, attend))
    code, said = LOADING[name]
    text = f"import os\n{code}\ndef judge(completions, prompts, **columns): return []\n"
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError, match=said) as caught:
        pool(f"{tmp_path / 'mine.py'}:judge", tmp_path / "rewards.log", memory_gib=0.5)
    line = str(caught.value)
    assert line.isprintable() and "judge`" in line
    if "last output" in line:
        assert line.endswith(f"(full output in {tmp_path / 'rewards.log'})")
        assert (tmp_path / "rewards.log").stat().st_size


def test_a_function_that_takes_too_much_memory_is_killed(tmp_path):
    code = "x = [bytearray(os.urandom(2**20)) for _ in range(2**14)]"
    with pool(module(tmp_path, code), memory_gib=0.25, timeout_s=200.0) as rewards:
        result = rewards.score(["1", "bad"], ["p"] * 2, {})
    assert (result.total, result.failed) == ([1.0, 0.0], {"judge": 1})
    assert "exceeded reward.memory_gib = 0.25 and was killed" in result.messages[-1]


def test_what_is_printed_is_bounded(tmp_path):
    log = tmp_path / "rewards.log"
    code = "[os.write(1, b'y' * 2**16) for _ in range(1600)]"  # 100 MiB
    with pool(module(tmp_path, code), log) as rewards:
        for _ in range(2):
            assert rewards.score(["bad"], ["p"], {}).total == [99.0]
    text = log.read_bytes()
    assert 2 * CALL_BYTES <= len(text) < 2 * CALL_BYTES + 1000
    assert f"[{100 * 2**20 - CALL_BYTES:,} bytes of output of a reward function omitted]".encode() in text


def test_the_log_keeps_the_latest_within_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr("qarl.rewards.log.FILE_BYTES", 3000)
    path = tmp_path / "rewards.log"
    for i in range(8):
        RewardLog(path).write(bytes([65 + i]) * 1000)
    both = path.read_bytes(), (tmp_path / "rewards.log.1").read_bytes()
    assert [set(map(chr, set(part))) for part in both] == [{"G", "H"}, {"D", "E", "F"}]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rewards.log", "rewards.log.1"]


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path):
    with pool(module(tmp_path, "print('lost')"), tmp_path / "gone" / "rewards.log") as rewards:
        assert rewards.score(["bad", "2"], ["p"] * 2, {}).total == [99.0, 2.0]
