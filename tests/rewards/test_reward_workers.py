"""Reward workers that hang, die, are interrupted or lose their parent."""

import math
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest
from ordered import score, wait_until
from process_tree import runs

from qarl.config.reward import RewardConfig
from qarl.errors import UserError
from qarl.rewards import RewardPool
from qarl.rewards.process import Worker


def test_hanging_function_takes_its_children_with_it(pool, monkeypatch, tmp_path):
    attend, begun = Worker.attend, tmp_path / "pid"

    def look(worker: Worker):
        worker.deadline = 0.0 if begun.exists() else math.inf  # it has its time once there is a child
        return attend(worker)

    rewards = pool(max_failed_frac=1.0)
    monkeypatch.setattr(Worker, "attend", look)
    assert "no answer within" in score(rewards, f"child {begun}").messages[0]
    child = int(begun.read_text())
    assert wait_until(lambda: not runs(child))


def test_worker_that_died_between_batches_blames_no_completion(pool):
    rewards = pool("pids")
    (pid,) = score(rewards, "1").total
    os.kill(int(pid), signal.SIGKILL)
    assert wait_until(lambda: not runs(int(pid)))
    result = score(rewards, "1")
    assert (result.failed, result.messages) == ({"pids": 0}, [])


@pytest.fixture
def dies_once_looked_at(monkeypatch, tmp_path):
    """Arranges that a worker dies between the next look that finds nothing to report and whatever is done after it.

    It returns the file that is there from then on: what waits for it ends with no other look.
    """
    attend, dead = Worker.attend, tmp_path / "dead"

    def look(worker: Worker):
        report = attend(worker)
        if report is None and (worker.starting or worker.task) and not dead.exists():
            os.kill(worker._process.pid, signal.SIGKILL)
            worker._process.wait()
            dead.touch()
        return report

    def arranged():
        dead.unlink(missing_ok=True)
        monkeypatch.setattr(Worker, "attend", look)
        return dead

    return arranged


def test_worker_that_dies_right_after_a_look_does_not_take_its_call_with_it(pool, dies_once_looked_at):
    rewards = pool(max_failed_frac=1.0)
    dead = dies_once_looked_at()
    result = score(rewards, f"wait for {dead}", "2")
    assert (result.failed, result.total) == ({"orders": 0}, [1.0, 2.0])
    assert [m.partition(":")[2] for m in result.messages] == [
        " its worker process died of SIGKILL; scoring its 2 completions one by one"
    ]
    result = score(rewards, f"wait for {dies_once_looked_at()}")
    assert dead.exists() and (result.failed, result.total) == ({"orders": 1}, [0.0])


def test_worker_that_dies_right_after_a_look_while_it_loads_is_not_started_again(dies_once_looked_at, tmp_path):
    path, dead = tmp_path / "loads.py", dies_once_looked_at()
    path.write_text(
        f"import os, time\nwhile not os.path.exists({str(dead)!r}):\n    time.sleep(0.02)\ndef own(**_): ..."
    )
    with pytest.raises(UserError, match=r"`own`: while loading it, its worker process died of SIGKILL"):
        RewardPool(RewardConfig(functions=[{"name": f"{path}:own"}]), [])


def test_worker_that_dies_when_it_has_just_said_that_it_is_ready_has_not_loaded(pool, monkeypatch):
    attend = Worker.attend

    def late(worker: Worker):
        said = worker._socket
        said.setblocking(True)
        while b"ready" not in said.recv(2**16, socket.MSG_PEEK):
            time.sleep(0.02)
        said.setblocking(False)
        os.kill(worker._process.pid, signal.SIGKILL)
        worker._process.wait()
        return attend(worker)

    monkeypatch.setattr(Worker, "attend", late)
    with pytest.raises(UserError, match=r"`orders`: while loading it, its worker process died of SIGKILL"):
        pool()


def test_interrupt_of_a_worker_changes_nothing(pool):
    assert score(pool(), "interrupt", "1").total == [5.0, 1.0]


def test_close_ends_the_workers_and_is_idempotent(pool):
    rewards = pool("pids", workers=2)
    pids = {int(pid) for pid in score(rewards, "1", "2").total}
    rewards.close()
    rewards.close()
    assert not any(runs(pid) for pid in pids)


PARENT = """
import sys
from types import SimpleNamespace as Namespace
from qarl.rewards import RewardPool

# No `if __name__ == "__main__"`: a worker that imported this file would start workers of its own.
functions = [Namespace(name=sys.argv[1] + ":pids", weight=1.0, options={}),
             Namespace(name=sys.argv[1] + ":orders", weight=1.0, options={})]
pool = RewardPool(Namespace(functions=functions, workers=2, timeout_s=600.0, max_failed_frac=1.0,
                            memory_gib=None), [])
print(*map(int, pool.score(["0", "1"], ["p"] * 2, {}).by_function["pids"]), flush=True)
pool.score(["hold the GIL"] * 2, ["p"] * 2, {})
"""


@pytest.fixture
def parent(file, tmp_path):
    """A process with a pool of two workers, both of which hold the GIL; and the workers' pids."""
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
    workers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(set(workers)) == 2
    for _ in workers:
        assert process.stderr.readline() == "holding\n"
    yield process, workers
    process.kill()
    process.communicate()
    for worker in filter(runs, workers):
        os.kill(worker, signal.SIGKILL)


def test_workers_die_with_a_parent_that_is_killed(parent):
    process, workers = parent
    assert all(map(runs, workers))
    process.kill()
    assert wait_until(lambda: not any(map(runs, workers)))


def test_ctrl_c_during_a_call_ends_the_parent_and_its_workers(parent):
    process, workers = parent
    os.killpg(process.pid, signal.SIGINT)  # what the terminal does: the whole foreground group
    _, err = process.communicate(timeout=60)
    assert err.strip().endswith("KeyboardInterrupt")
    assert wait_until(lambda: not any(map(runs, workers)))


def test_worker_imports_neither_torch_nor_other_heavy_packages():
    code = "import sys, qarl.rewards.worker; print([m for m in sys.modules if '.' not in m])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    modules = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    for heavy in ("torch", "numpy", "transformers", "datasets", "pydantic", "sympy", "math_verify", "reasoning_gym"):
        assert f"'{heavy}'" not in modules


LAUNCHERS = [
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
    *("ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "QARL_RANKS"),
]


def test_a_worker_inherits_the_environment_without_the_variables_of_launchers(tmp_path, monkeypatch):
    for name in [*LAUNCHERS, "MINE"]:
        monkeypatch.setenv(name, "1")
    (tmp_path / "mine.py").write_text(
        "import os\ndef sees(completions, **columns): return [float(name in os.environ) for name in completions]\n"
    )
    names = [*LAUNCHERS, "MINE", "PATH"]
    with RewardPool(RewardConfig(functions=[{"name": f"{tmp_path}/mine.py:sees"}]), []) as rewards:
        assert dict(zip(names, score(rewards, *names).total, strict=True)) == {
            **dict.fromkeys(LAUNCHERS, 0.0),
            "MINE": 1.0,
            "PATH": 1.0,
        }
