"""Reward modules that misbehave: while they are loaded, in what they return, and in what they do to their process.

One of each class, through the command line. All that a worker's pool must bear: tests/rewards/test_reward_hostile.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from fuzzing.base import NEW_RUN, config, lay_out
from fuzzing.case import Case
from fuzzing.values import OVERRIDE, chance, listed, make_traps, pick, shown
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, sampled_from

LOG_LIMIT = 64 * 2**20  # bytes of rewards.log
PRELUDE = """\
import atexit, builtins, functools, itertools, json, math, numpy, os, shutil, signal, subprocess, sys, threading, time
state = []
class Unprintable(Exception):
    def __str__(self): raise RuntimeError('no text')
    __repr__ = __str__
def scribble(data):
    for fd in range(3, 40):
        try:
            os.set_blocking(fd, False); os.write(fd, data)
        except OSError: pass
"""
FUNCTION = """\
def f(completions, prompts, **columns):
    honest = [float(len(c)) for c in completions]
"""
ERRORS = listed("""
    ValueError('no')  KeyboardInterrupt  Unprintable()  ValueError(chr(0xd800))  GeneratorExit  SystemExit(0)
    ValueError(chr(27) + '[31m' + chr(0x202e) + 'x' * 100000)  BaseExceptionGroup('g', [KeyboardInterrupt()])
""")
# Bodies whose every call must count as failed: bad scores, an error, an end of the process, a hang.
FAILING = [f"raise {error}" for error in ERRORS] + listed(r"""
    return [str(x) for x in honest]  return [float('nan') for x in honest]  return [10**400 for x in honest]
    return None  return honest[:-1]  return '1' * len(completions)  return itertools.repeat(1.0)
    os._exit(0)  os.kill(os.getpid(), signal.SIGSEGV)  os.kill(os.getpid(), signal.SIGSTOP); return honest
    time.sleep(2.5); return honest  signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32)); time.sleep(1000)
    while True: print('x' * 100_000)
""")
# What a reward does to its process, its parent or the machine before it returns honest scores.
HARMS = listed(r"""
    [os.fork() for _ in range(3)]  subprocess.Popen(['sleep', '99'])  scribble(b'rubbish\n' * 3)  signal.alarm(1)
    scribble(b'["scores", [1, 1, 1, 1]]\n')  scribble(b'\x7f\xff\xff\xff')  scribble(b'x' * 5_000_000)  os.chdir('/')
    os.closerange(0, 100)  os.closerange(3, 100)  os.killpg(0, 9)  atexit.register(time.sleep, 1000)  pass
    [print('x' * 1_000_000) for _ in range(100)]  print(chr(27) + '[31m' + chr(0x202e))  os.write(1, bytes(range(256)))
    state.append(bytearray(1_000_000_000))  completions.clear(); prompts.clear()  sys.stdout = sys.stderr = None
    shutil.rmtree(os.getcwd(), ignore_errors=True)  json.dumps = json.loads = lambda *a, **k: '[]'
    builtins.float = builtins.len = builtins.list = None  state.append(1); x = 1 / (len(state) - 1)
""")
# Bodies of which no completion may have a score but 0 and the honest one, its length.
HONEST = [f"{harm}\n    return honest" for harm in HARMS] + listed("""
    return (x for x in honest)  return numpy.array(honest)  while True: state.append(bytearray(200_000_000))
""")
# Bodies with scores of their own, about which nothing is known.
OWN = listed("""
    return [1e308 * i for i, _ in enumerate(honest)]  return [1e-320 * i for i, _ in enumerate(honest)]
    return [x > 3 for x in honest]  math.isfinite = lambda x: True; return [float('nan') for x in honest]
""")
# What a module does while it is loaded, before the function is defined.
HEADS = [f"raise {error}" for error in ERRORS] + HARMS + ["\0", "[" * 5_000 + "]" * 5_000]
HEADS += listed(r"""
    import no_such_module  def (  print('because of this', flush=True); os._exit(3)  os.kill(os.getpid(), 9)
    from qarl.errors import UserError; raise UserError('a\nb')  scribble(b'["ready", null]\n')
""")
ONES = "[1.0] * len(completions)"
# What stands where the function should.
OBJECTS = (
    *listed("f = 5  f = len  f = type  f = os"),
    f"def f(completions, prompts, nosuch, **columns): return {ONES}",
    f"async def f(completions, prompts, **columns): return {ONES}",
    f"f = functools.partial(lambda a, completions, prompts, **c: {ONES}, 1)",
    "class f:\n    def __getattr__(self, name): raise ValueError(name)\nf = f()",
)
OPTIONS = ({"completions": 1}, {"prompts": []}, {"a b": 1}, {OVERRIDE: 1}, {"x": [[[]]] * 100})


def mutate_reward(draw: DrawFn, base: Path, case: Case) -> None:
    """Two steps of training with such a module."""
    make_traps(case.cwd)
    lay_out(base, case, "model")
    body, head, tail = "return honest", "", ""
    part = pick(draw, ("body", "body", "body", "head", "object", "file"))
    if part == "body":
        what = body = draw(sampled_from(FAILING) | sampled_from(HONEST) | sampled_from(OWN))
    elif part == "head":
        what = head = pick(draw, HEADS)
    else:
        what = pick(draw, OBJECTS)
        tail = f"\ndel f\n{what}\n"
    data = f"{PRELUDE}{head}\n{FUNCTION}    {body}\n{tail}".encode("utf-8", "surrogatepass")
    if part == "file":
        odd = (data + b"\n# \xff", data.decode().encode("utf-16"), b"", b"\xef\xbb\xbf" + data)
        data = draw(sampled_from(odd) | st.binary(min_size=100, max_size=500))
        what = f"{what}, file begins with {data[:8]!r}"
    (case.cwd / "reward.py").write_bytes(data)
    function: dict[str, Any] = {"name": "./reward.py:f", "weight": pick(draw, (1.0, 1.0, 0.0, -1.0, 0.5))}
    if chance(draw, 10):
        function["options"] = pick(draw, OPTIONS)
    functions = [function, {"name": "length", "options": {"target": 4}}] if chance(draw, 30) else [function]
    limits = {"timeout_s": 1.0, "max_failed_frac": pick(draw, (0.5, 1.0, 1.0)), "workers": pick(draw, (1, 1, 2))}
    settings = config(reward={"functions": functions, **limits}, train={"steps": 2})
    (case.cwd / "c.yaml").write_text(yaml.safe_dump(settings))
    case.argv = ["train", "c.yaml"]
    case.mutation = f"reward {part}: {shown(what, 200)}, options {function.get('options')!a:.40}"
    case.examine = lambda cwd: _examine(cwd, body if part == "body" else "")


def _examine(cwd: Path, body: str) -> str | None:
    """What is wrong with an accepted run of this body; "" if scores say nothing."""
    run = cwd / NEW_RUN
    log = run / "rewards.log"
    if log.exists() and log.stat().st_size > LOG_LIMIT:
        return "rewards.log has no bound"
    if not body or not (run / "metrics.jsonl").exists():  # told by nothing, or refused
        return None
    for record in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        if body in FAILING and not record["reward/failed"]:
            return f"`{body}` was scored, and not counted as failed"
        if any(value is None for name, value in record.items() if name.startswith("reward/")):
            return f"`{body}` made the reward no finite number"
    rows = [row for path in sorted((run / "rollouts").glob("*.jsonl")) for row in path.read_text().splitlines()]
    for row in map(json.loads, rows):
        if body not in OWN and row["rewards"]["f"] not in (0.0, float(len(row["completion"]))):
            return f"`{body}` has a score of another completion"
    return None
