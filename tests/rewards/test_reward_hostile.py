"""Reward functions that do to their worker what they can: scored 0 and counted, and the others' scores are right."""

import random
import time
from pathlib import Path

import pytest
from reward_limits import limit_only

from qarl.config.reward import RewardConfig
from qarl.rewards import RewardPool

# What `judge` does before any score of its call is returned, when one of the n completions is the name of a case.
HOSTILE = {
    "the length of an endless frame": "rubbish(struct.pack('>Q', 2**63)); time.sleep(3600)",
    "a frame of no JSON": "rubbish(struct.pack('>Q', 9) + b'{nonsense')",
    "the GIL held": "re.match(r'(a+)+$', 'a' * 60 + 'b')",  # no signal handler of Python runs
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "an exception without a text": "raise Mute()",
    "an exception with control characters": "raise ValueError('\\x1b[2J\\u202e \\ud800')",
    "over the bound": "return [1.0000001e9] * n",
    "numpy's infinity": "return __import__('numpy').full(n, -float('inf'))",
    "a generator without an end": "return iter(int, 1)",
    "nothing of the length": "return []",
}
SILENT = [name for name, code in HOSTILE.items() if "sleep" in code or "SIGSTOP" in code or "re.match" in code]

MODULE = """
import os, re, signal, struct, time

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")

def rubbish(data):
    for fd in range(3, 256):
        try:
            os.write(fd, data)
        except OSError:
            pass

def judge(completions, prompts, **columns):
    n = len(completions)
CASES
    return [99.0 if c in NAMES else float(c) for c in completions]
"""


def module(folder: Path, cases: dict[str, str]) -> str:
    """cases: completion -> what is done when it is among the completions."""
    lines = [f"    if {name!r} in completions:\n        {code}" for name, code in cases.items()]
    path = folder / "hostile.py"
    path.write_text(MODULE.replace("CASES", "\n".join(lines)).replace("NAMES", repr(list(cases))))
    return f"{path}:judge"


# What hangs has a group of its own, where little time is lost with it.
@pytest.mark.parametrize("names", [[name for name in HOSTILE if name not in SILENT], SILENT], ids=["others", "silent"])
def test_what_a_function_does_costs_its_own_completion_only(tmp_path, monkeypatch, names):
    limit_only(monkeypatch, names)
    monkeypatch.setattr("qarl.rewards.batch.IMPATIENT", 1.0)
    rng = random.Random(names[0])
    completions = rng.sample([*names, *map(str, range(-3, 5))], len(names) + 8)
    limits = {"timeout_s": 0.5 if names[0] in SILENT else 5.0, "max_failed_frac": 1.0}
    config = RewardConfig(functions=[{"name": module(tmp_path, HOSTILE)}], **limits)
    with RewardPool(config, [], tmp_path / "log") as rewards:
        started = time.monotonic()
        result = rewards.score(completions, ["p"] * len(completions), {})
        assert time.monotonic() - started < 120.0
        assert result.total == [0.0 if c in names else float(c) for c in completions]
        assert result.failed == {"judge": len(names)}
        assert names[0] not in SILENT or any("no answer within 0.5 s" in message for message in result.messages)
        for message in result.messages:
            assert message.isprintable() and len(message) < 3000, message
        assert rewards.score(["5", "6"], ["p"] * 2, {}).total == [5.0, 6.0]  # and nothing is left behind


def test_a_weight_that_makes_too_much_of_a_score_fails_it(tmp_path):
    name = module(tmp_path, {"bad": "pass"})
    config = RewardConfig(functions=[{"name": name, "weight": 1e6}, {"name": "length", "weight": 0.5}])
    with RewardPool(config, []) as rewards:
        result = rewards.score(["1000", "1001", "2"], ["p"] * 3, {})
    assert result.total == [1e9 - 2.0, -2.0, 2e6 - 0.5]
    assert result.by_function["judge"] == [1000.0, 0.0, 2.0]
    assert result.failed == {"judge": 1, "length": 0}
    assert "completion 1 scores 0: 1001 times its weight 1e+06 exceeds the limit of 1e+09" in result.messages[0]


FORKS = {
    "libc.fork": "if libc.fork() == 0: time.sleep(child_s); return [float(c) for c in completions]",
    "libc.fork, parent waits": "pid = libc.fork()\n    if pid == 0: return [-9.0] * 4\n    os.waitpid(pid, 0)",
}


@pytest.mark.parametrize("name", FORKS)
def test_a_child_answers_for_nobody(tmp_path, name):
    """The batch's own scores, step after step, however late the children of the steps before return."""
    (tmp_path / "forks.py").write_text(
        "import ctypes, os, time\nlibc = ctypes.CDLL(None)\n"
        "def judge(completions, prompts, **columns):\n"
        "    child_s = 0.05 if prompts[0] == 'late' else 0.0\n"
        f"    {FORKS[name]}\n"
        "    time.sleep(0.02)\n    return [float(c) for c in completions]\n"
    )
    with RewardPool(RewardConfig(functions=[{"name": f"{tmp_path / 'forks.py'}:judge"}]), []) as rewards:
        for step in range(4):
            completions = [str(100 * step + i) for i in range(4)]
            result = rewards.score(completions, ["late" if step % 2 else "soon"] * 4, {})
            assert result.total == [float(c) for c in completions]
            assert result.failed == {"judge": 0}
            time.sleep(0.08)  # for the learner: whoever answers late has done so when the next step asks
