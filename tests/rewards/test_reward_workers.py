"""Reward workers that hang, die, are interrupted or lose their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from ordered import running, score, wait_until

from qarl.errors import UserError
from qarl.rewards.process import Worker


@pytest.mark.parametrize("order", ["sleep", "hold the GIL"])
def test_hanging_function_is_killed_and_replaced(pool, order):
    rewards = pool(timeout_s=1.0)
    started = time.monotonic()
    result = score(rewards, "1", order, "3")
    assert time.monotonic() - started < 60.0
    assert result.total == [1.0, 0.0, 3.0]
    assert "no answer within 1 s" in result.messages[1]
    assert score(rewards, "7").total == [7.0]


def test_hanging_function_takes_its_children_with_it(pool, tmp_path):
    score(pool(timeout_s=1.0, max_failed_frac=1.0), f"child {tmp_path / 'pid'}")
    child = int((tmp_path / "pid").read_text())
    assert wait_until(lambda: not running(child))


def test_worker_that_died_between_batches_blames_no_completion(pool):
    rewards = pool("pids")
    (pid,) = score(rewards, "1").total
    os.kill(int(pid), signal.SIGKILL)
    assert wait_until(lambda: not running(int(pid)))
    result = score(rewards, "1")
    assert (result.failed, result.messages) == ({"pids": 0}, [])


@pytest.fixture
def dies_once_looked_at(monkeypatch):
    """A worker dies between the look that found nothing to report and whatever is done after it."""
    attend, looks = Worker.attend, []

    def look(worker: Worker):
        report = attend(worker)
        if report is None and (worker.starting or worker.task) and looks:
            looks.pop()
            os.kill(worker._process.pid, signal.SIGKILL)
            worker._process.wait()
        return report

    monkeypatch.setattr(Worker, "attend", look)
    return looks


def test_worker_that_dies_right_after_a_look_does_not_take_its_call_with_it(pool, dies_once_looked_at):
    rewards = pool("pids", max_failed_frac=1.0)
    dies_once_looked_at.append("of the call for both")
    result = score(rewards, "1", "2")
    assert dies_once_looked_at == [] and result.failed == {"pids": 0} and all(result.total)
    assert [m.partition(":")[2] for m in result.messages] == [
        " its worker process died of SIGKILL; scoring its 2 completions one by one"
    ]
    dies_once_looked_at.append("of the call for one")
    result = score(rewards, "1")
    assert dies_once_looked_at == [] and (result.failed, result.total) == ({"pids": 1}, [0.0])


def test_worker_that_dies_right_after_a_look_while_it_loads_is_not_started_again(pool, dies_once_looked_at):
    dies_once_looked_at.append("of the loading")
    with pytest.raises(UserError, match=r"`orders`: while it was loaded, its worker process died of SIGKILL"):
        pool()
    assert dies_once_looked_at == []


def test_interrupt_of_a_worker_changes_nothing(pool):
    assert score(pool(), "interrupt", "1").total == [5.0, 1.0]


def test_close_ends_the_workers_and_is_idempotent(pool):
    rewards = pool("pids", workers=2)
    pids = {int(pid) for pid in score(rewards, "1", "2").total}
    rewards.close()
    rewards.close()
    assert not any(running(pid) for pid in pids)


PARENT = """
import sys
from types import SimpleNamespace as Namespace
from qarl.rewards import RewardPool

# No `if __name__ == "__main__"`: a worker that imported this file would start workers of its own.
functions = [Namespace(name=sys.argv[1] + ":pids", weight=1.0, options={}),
             Namespace(name=sys.argv[1] + ":orders", weight=1.0, options={})]
pool = RewardPool(Namespace(functions=functions, workers=1, timeout_s=600.0, max_failed_frac=1.0,
                            memory_gib=None))
print(int(pool.score(["0"], ["p"], {}).by_function["pids"][0]), flush=True)
pool.score(["hold the GIL"], ["p"], {})
"""


@pytest.fixture
def parent(file, tmp_path):
    """A process with a pool of one worker, which is about to hang; and the worker's pid."""
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, str(script), str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
        # where the tests run in the background of a script, SIGINT is ignored, and children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    worker = int(process.stdout.readline())
    yield process, worker
    process.kill()
    process.communicate()
    if running(worker):
        os.kill(worker, signal.SIGKILL)


def test_workers_die_with_a_parent_that_is_killed(parent):
    process, worker = parent
    time.sleep(0.5)  # into the call that holds the GIL
    assert running(worker)
    process.kill()
    assert wait_until(lambda: not running(worker))


def test_ctrl_c_during_a_call_ends_the_parent_and_its_worker(parent):
    process, worker = parent
    os.killpg(process.pid, signal.SIGINT)  # what the terminal does: the whole foreground group
    _, err = process.communicate(timeout=60)
    assert err.strip().endswith("KeyboardInterrupt")
    assert wait_until(lambda: not running(worker))


def test_worker_imports_neither_torch_nor_other_heavy_packages():
    code = "import sys, qarl.rewards.worker; print([m for m in sys.modules if '.' not in m])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    modules = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    for heavy in ("torch", "numpy", "transformers", "datasets", "pydantic", "sympy", "math_verify", "reasoning_gym"):
        assert f"'{heavy}'" not in modules
