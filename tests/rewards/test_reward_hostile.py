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
    "rubbish on all descriptors": "rubbish(b'rubbish' * 9)",
    "half a frame, then silence": "rubbish(b'\\0' * 7 + b'\\5{}'); time.sleep(3600)",
    "the length of an endless frame": "rubbish(struct.pack('>Q', 2**63)); time.sleep(3600)",
    "a frame over the limit": "rubbish(struct.pack('>Q', 2**25) + b'[' * 2**25)",
    "a frame of no JSON": "rubbish(framed(b'{nonsense'))",
    "a frame of 100,000 brackets": "rubbish(framed(b'[' * 100000))",
    "a frame that is a list": "rubbish(framed(b'[1, \"scores\", [7.0]]'))",
    "a reply without a number": 'rubbish(framed(b\'{"kind": "scores", "value": [7.0]}\'))',
    "a number of 5,000 digits": "rubbish(framed(b'{\"request\": ' + b'9' * 5000 + b'}'))",
    "an error that is no text": 'rubbish(framed(b\'{"request": %d, "kind": "error", "value": 3}\' % number()))',
    "scores that are too many": "forge([1.0] * (n + 1))",
    "scores that are text": "forge(['7'] * n)",
    "scores that are no list": "forge({str(i): 7.0 for i in range(n)})",
    "scores of 5,000 digits": 'rubbish(framed(b\'{"request": %d, "kind": "scores", "value": [\' % number() '
    "+ b','.join([b'9' * 5000] * n) + b']}'))",
    "scores that are Infinity": "forge([float('inf')] * n)",
    "scores of 1e308 on the wire": "forge([1e308] * n)",
    "a flood of answers to others": "flood()",
    "descriptors closed, then silence": "os.closerange(0, 256); time.sleep(3600)",
    "silence": "time.sleep(3600)",
    "the GIL held": "re.match(r'(a+)+$', 'a' * 60 + 'b')",  # no signal handler of Python runs
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "leaves at once": "os._exit(0)",
    "killed by a real-time signal": "os.kill(os.getpid(), 40)",
    "an exception without a text": "raise Mute()",
    "an exception that is none": "raise Bare()",
    "an exception with a long text": "raise ValueError('x' * 10**7)",
    "an exception with control characters": "raise ValueError('\\x1b[2J\\u202e \\ud800')",
    "endless recursion": "judge(completions, prompts)",
    "over the bound": "return [1.0000001e9] * n",
    "an integer of 5,000 digits": "return [10**5000] * n",
    "numpy's infinity": "return __import__('numpy').full(n, -float('inf'))",
    "a dict": "return dict.fromkeys(range(n), 1.0)",
    "a set": "return set(range(n))",
    "text": "return '1' * n",
    "bytes": "return bytes(n)",
    "a generator without an end": "return iter(int, 1)",
    "a generator that hangs": "return (time.sleep(3600) for _ in range(n))",
    "deeply nested lists": "return deep(100000)",
    "two dimensions": "return __import__('numpy').ones((n, 2))",
    "complex numbers": "return [1j] * n",
    "an object that lies about its items": "return Liar()",
    "nothing of the length": "return []",
}
SILENT = [name for name, code in HOSTILE.items() if "sleep" in code or "SIGSTOP" in code or "re.match" in code]

MODULE = """
import ctypes, json, os, re, signal, struct, sys, time

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")

class Bare(BaseException):
    pass

class Liar:
    def __len__(self):
        return 1
    def __iter__(self):
        raise OSError("no items")

def deep(levels):
    value = 1.0
    for _ in range(levels):
        value = [value]
    return value

def rubbish(data):
    for fd in range(3, 256):
        try:
            os.write(fd, data)
        except OSError:
            pass

def framed(text):
    return struct.pack(">Q", len(text)) + text

def connection():
    frame = sys._getframe()
    while "connection" not in frame.f_locals or "request" not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals["connection"]

def number():
    return connection()._request

def forge(value):
    rubbish(framed(json.dumps({"request": number(), "kind": "scores", "value": value}).encode()))

def flood():
    for i in range(100000):
        rubbish(framed(json.dumps({"request": -i, "kind": "scores", "value": [7.0]}).encode()))

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


def pool(name: str, log_path: Path | None = None, **fields) -> RewardPool:
    return RewardPool(RewardConfig(functions=[{"name": name}], **fields), [], log_path)


def groups(names: list[str], size: int) -> list[list[str]]:
    shuffled = random.Random(0).sample(names, len(names))
    return [shuffled[i : i + size] for i in range(0, len(names), size)]


# What hangs has a group of its own, where little time is lost with it.
@pytest.mark.parametrize("names", groups([n for n in HOSTILE if n not in SILENT], 12) + groups(SILENT, 4))
def test_what_a_function_does_costs_its_own_completion_only(tmp_path, monkeypatch, names):
    limit_only(monkeypatch, names)
    monkeypatch.setattr("qarl.rewards.batch.IMPATIENT", 1.0)
    rng = random.Random(names[0])
    completions = rng.sample([*names, *map(str, range(-3, 5))], len(names) + 8)
    limits = {"timeout_s": 0.5 if names[0] in SILENT else 5.0, "max_failed_frac": 1.0}
    with pool(module(tmp_path, HOSTILE), tmp_path / "log", **limits) as rewards:
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
    "multiprocessing": "p = multiprocessing.get_context('fork').Process(target=time.sleep, args=(child_s,)); p.start()",
}


@pytest.mark.parametrize("name", FORKS)
def test_a_child_answers_for_nobody(tmp_path, name):
    """The batch's own scores, step after step, however late the children of the steps before return."""
    (tmp_path / "forks.py").write_text(
        "import ctypes, multiprocessing, os, time\nlibc = ctypes.CDLL(None)\n"
        "def judge(completions, prompts, **columns):\n"
        "    child_s = 0.05 if prompts[0] == 'late' else 0.0\n"
        f"    {FORKS[name]}\n"
        "    time.sleep(0.02)\n    return [float(c) for c in completions]\n"
    )
    with pool(f"{tmp_path / 'forks.py'}:judge") as rewards:
        for step in range(4):
            completions = [str(100 * step + i) for i in range(4)]
            result = rewards.score(completions, ["late" if step % 2 else "soon"] * 4, {})
            assert result.total == [float(c) for c in completions]
            assert result.failed == {"judge": 0}
            time.sleep(0.08)  # for the learner: whoever answers late has done so when the next step asks


def test_a_second_reply_is_not_the_next_calls(tmp_path):
    with pool(module(tmp_path, {"bad": "forge([7.0] * n)"})) as rewards:
        assert rewards.score(["bad", "1"], ["p"] * 2, {}).total == [7.0, 7.0]  # its own call it may answer as it likes
        result = rewards.score(["2", "3"], ["p"] * 2, {})
    assert (result.total, result.failed) == ([2.0, 3.0], {"judge": 0})
    assert [m for m in result.messages if "dropped 1 replies that did not belong" in m] == result.messages
