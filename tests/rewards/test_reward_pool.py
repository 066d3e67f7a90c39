from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from qarl.config.reward import RewardConfig
from qarl.errors import UserError
from qarl.rewards import RewardPool
from qarl.rewards.process import Worker

# Each completion is an order: what the function does with it.
FUNCTIONS = r"""
import ctypes, math, os, re, signal, subprocess, sys, time

def orders(completions, prompts, **columns):
    scores = []
    for order in completions:
        if order == "raise":
            raise ValueError("I was\ntold to")
        elif order == "exit":
            sys.exit("bye")
        elif order == "die":
            os._exit(3)
        elif order == "segfault":
            ctypes.string_at(0)
        elif order == "sleep":
            time.sleep(3600)
        elif order == "hold the GIL":
            re.match(r"(a+)+$", "a" * 60 + "b")
        elif order.startswith("child "):
            child = subprocess.Popen(["sleep", "3600"])
            with open(order.removeprefix("child "), "w") as file:
                file.write(str(child.pid))
            child.wait()
        elif order == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            scores.append(5.0)
        elif order == "print":
            print("printed by the reward")
            os.write(1, b"\x00\x01 written to fd 1\n")
            scores.append(4.0)
        elif order.startswith("return "):
            return eval(order.removeprefix("return "), {"c": completions})
        else:
            scores.append(float(order))
    return scores

def whole_batches_only(completions, prompts, **columns):
    if len(completions) > 1:
        raise RuntimeError("too many at once")
    return [float(completions[0])]

def answers(completions, prompts, answer, **columns):
    return [float(c == a) for c, a in zip(completions, answer)]

def pids(completions, prompts, **columns):
    time.sleep(0.2)
    return [os.getpid()] * len(completions)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("functions") / "functions.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def pool(file):
    pools = []

    def make(*names: str, log_path: Path | None = None, **fields) -> RewardPool:
        functions = [{"name": f"{file}:{name}"} for name in names or ("orders",)]
        pools.append(RewardPool(RewardConfig(functions=functions, **fields), log_path=log_path))
        return pools[-1]

    yield make
    for each in pools:
        each.close()


def prompts(completions: list[str]) -> list[str]:
    return ["p"] * len(completions)


def score(rewards: RewardPool, *completions: str):
    return rewards.score(list(completions), prompts(completions), {})


def running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_until(condition, limit_s: float = 60.0) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("workers", [1, 3])
def test_scores_keep_the_order_of_the_batch(pool, workers):
    completions = [str(i) for i in range(10)]
    result = score(pool(workers=workers), *completions)
    assert result.total == [float(i) for i in range(10)]
    assert (result.failed, result.messages) == ({"orders": 0}, [])


def test_total_is_the_weighted_sum(file):
    functions = [
        {"name": "exact", "weight": 2.0},
        {"name": f"{file}:answers", "weight": -0.5},
        {"name": "length", "weight": 0.25, "options": {"unit": "words"}},
    ]
    with RewardPool(RewardConfig(functions=functions), columns=["answer"]) as rewards:
        result = rewards.score(["a", "b c"], ["p", "p"], {"answer": ["a", "a"]})
    assert result.by_function == {"exact": [1.0, 0.0], "answers": [1.0, 0.0], "length": [-1.0, -2.0]}
    assert result.total == [2.0 - 0.5 - 0.25, -0.5]


def test_workers_get_their_own_part_of_the_columns(pool):
    rewards = pool("answers", workers=2)
    assert rewards.score(["a", "b", "c"], ["p"] * 3, {"answer": ["a", "x", "c"]}).total == [1.0, 0.0, 1.0]


def test_workers_run_at_the_same_time(pool):
    assert len(set(score(pool("pids", workers=2), "1", "2").total)) == 2


def test_empty_batch_has_no_scores(pool):
    assert pool().score([], [], {}).total == []


def test_lists_of_unequal_length_are_refused(pool):
    with pytest.raises(ValueError, match="answer has 1 values for 2 completions"):
        pool().score(["1", "2"], ["p", "p"], {"answer": ["a"]})


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("raise", r"ValueError: I was told to \(functions.py:8\)"),
        ("exit", r"SystemExit: bye"),
        ("die", r"its worker process exited with code 3"),
        ("segfault", r"its worker process died of SIGSEGV"),
        ("return [1.0] * (len(c) + 1)", r"returned 2 scores for 1 completions"),
        ("return []", r"returned 0 scores for 1 completions"),
        ("return None", r"returned NoneType, expected a list of 1 numbers"),
        ("return 1.0", r"returned float, expected a list"),
        ("return [None] * len(c)", r"returned None \(NoneType\), expected a number"),
        ("return ['1'] * len(c)", r"returned '1' \(str\), expected a number"),
        ("return [[1.0]] * len(c)", r"returned \[1.0\] \(list\), expected a number"),
        ("return [float('nan')] * len(c)", r"returned nan, expected a finite number"),
        ("return [float('-inf')] * len(c)", r"returned -inf, expected a finite number"),
    ],
)
def test_only_the_guilty_completion_scores_zero(pool, order, message):
    rewards = pool()
    result = score(rewards, "1", order, "3")
    assert result.total == [1.0, 0.0, 3.0]
    assert result.failed == {"orders": 1}
    assert len(result.messages) == 2  # the batch, then the completion
    assert re.search(message, result.messages[1])
    assert result.messages[1].startswith("reward `orders`: completion 1 scores 0: ")
    assert score(rewards, "7").total == [7.0]


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


def test_numbers_of_other_types_are_scores(pool):
    rewards = pool()
    assert score(rewards, "return [True] * len(c)").total == [1.0]
    assert score(rewards, "return tuple(2 for _ in c)").total == [2.0]
    assert score(rewards, "return __import__('numpy').full(len(c), 1.5, 'float32')").total == [1.5]


def test_function_that_fails_only_on_batches_counts_no_failure(pool):
    result = score(pool("whole_batches_only"), "1", "2")
    assert (result.total, result.failed) == ([1.0, 2.0], {"whole_batches_only": 0})
    assert "too many at once" in result.messages[0]


def test_failures_are_logged(pool, caplog):
    score(pool(), "1", "raise", "3")
    assert [record.levelname for record in caplog.records if record.name == "qarl.rewards"] == ["WARNING"] * 2


def test_failures_up_to_the_fraction_are_endured(pool):
    assert score(pool(max_failed_frac=0.5), "raise", "1", "raise", "2").failed == {"orders": 2}


def test_failures_past_the_fraction_stop_the_run(pool):
    rewards = pool(max_failed_frac=0.5)
    message = (
        r"reward `orders`: failed on 3 of 4 completions, more than reward.max_failed_frac 0.5; the last: SystemExit"
    )
    with pytest.raises(UserError, match=message):
        score(rewards, "raise", "1", "raise", "exit")
    assert score(rewards, "7").total == [7.0]


def test_fraction_counts_each_function_alone(pool):
    # One of two functions fails on 2 of 3: that is a third of all scores, and still past one half.
    with pytest.raises(UserError, match=r"reward `orders`: failed on 2 of 3"):
        score(pool("pids", "orders", max_failed_frac=0.5), "raise", "1", "raise")


def test_stop_does_not_leave_old_answers_behind(pool):
    rewards = pool(workers=2, max_failed_frac=0.0)
    with pytest.raises(UserError):
        score(rewards, "raise", "sleep")
    assert score(rewards, "5", "6").total == [5.0, 6.0]


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
        if report is None and (worker.starting or worker.task) and worker.alive and looks:
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


def test_missing_column_names_the_function_and_the_argument(pool):
    with pytest.raises(UserError, match=r"reward `answers`: failed on 1 of 1 .*missing 1 required.*'answer'"):
        score(pool("answers"), "a")


def test_interrupt_of_a_worker_changes_nothing(pool):
    assert score(pool(), "interrupt", "1").total == [5.0, 1.0]


def test_prints_go_to_the_log_and_not_into_the_protocol(pool, tmp_path, capfd):
    rewards = pool(log_path=tmp_path / "rewards.log")
    assert score(rewards, "print", "1").total == [4.0, 1.0]
    assert (tmp_path / "rewards.log").read_bytes() == b"printed by the reward\n\x00\x01 written to fd 1\n"
    assert capfd.readouterr() == ("", "")


def test_prints_without_a_log_stay_off_standard_output(pool, capfd):
    score(pool(), "print")
    out, err = capfd.readouterr()
    assert (out, "printed by the reward" in err) == ("", True)


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
from qarl.rewards.process import Worker

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
