"""Reward workers that hang, die, are interrupted or lose their parent."""

import math
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from ordered import score, wait_until
from process_tree import runs

from qarl.config.reward import RewardConfig
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
functions = [Namespace(name=sys.argv[1] + ":pids", weight=1.0, options={}, builtin=False),
             Namespace(name=sys.argv[1] + ":orders", weight=1.0, options={}, builtin=False)]
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


def test_a_worker_inherits_the_environment_without_the_variables_of_launchers(tmp_path, monkeypatch):
    launchers = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "QARL_RANKS"]
    for name in [*launchers, "MINE"]:
        monkeypatch.setenv(name, "1")
    (tmp_path / "mine.py").write_text(
        "import os\ndef sees(completions, **columns): return [float(name in os.environ) for name in completions]\n"
    )
    with RewardPool(RewardConfig(functions=[{"name": f"{tmp_path}/mine.py:sees"}]), []) as rewards:
        assert score(rewards, *launchers, "MINE", "PATH").total == [*[0.0] * len(launchers), 1.0, 1.0]
