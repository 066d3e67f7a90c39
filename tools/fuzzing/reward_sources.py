"""The Python of reward modules that misbehave, by a few words of what each does."""

from __future__ import annotations

# Bodies of f(completions, prompts, **columns). The honest score of a completion is its length; `honest` is all of them.
BODIES: dict[str, str] = {
    "honest": "return honest",
    "honest, generator": "return (x for x in honest)",
    "honest, tuple": "return tuple(honest)",
    "honest, numpy": "import numpy; return numpy.array(honest)",
    "honest, bool": "return [len(c) > 3 for c in completions]",
    "raises": "raise ValueError('no')",
    "raises once": "state.append(1); x = 1 / (len(state) - 1); return honest",
    "exits": "sys.exit(0)",
    "exits hard": "os._exit(0)",
    "interrupts": "raise KeyboardInterrupt",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "segfault": "os.kill(os.getpid(), signal.SIGSEGV)",
    "stops itself": "os.kill(os.getpid(), signal.SIGSTOP); return honest",
    "recurses": "return f(completions, prompts, **columns)",
    "sleeps": "time.sleep(1000)",
    "spins": "while True: pass",
    "stops for long": "time.sleep(2.5); return honest",
    "none": "return None",
    "dict": "return dict.fromkeys(range(len(completions)), 1.0)",
    "dict of completions": "return {c + str(i): 1.0 for i, c in enumerate(completions)}",
    "string": "return '1' * len(completions)",
    "bytes": "return bytes(len(completions))",
    "set": "return set(map(float, range(len(completions))))",
    "number": "return 1.0",
    "short": "return honest[:-1]",
    "long": "return honest + [1.0]",
    "empty": "return []",
    "nested": "return [[x] for x in honest]",
    "strings": "return [str(x) for x in honest]",
    "nones": "return [None for x in honest]",
    "nan": "return [float('nan') for x in honest]",
    "infinity": "return [float('inf') for x in honest]",
    "1e308": "return [1e308 for x in honest]",
    "1e308 both ways": "return [1e308 * (-1) ** i for i, x in enumerate(honest)]",
    "1e200": "return [1e200 * i for i, x in enumerate(honest)]",
    "1e39": "return [1e39 * i for i, x in enumerate(honest)]",
    "3e38": "return [3e38 * i for i, x in enumerate(honest)]",
    "1e-320": "return [1e-320 * i for i, x in enumerate(honest)]",
    "huge integer": "return [10**400 for x in honest]",
    "digits": "return [10**5000 for x in honest]",
    "complex": "return [1j for x in honest]",
    "decimal": "import decimal; return [decimal.Decimal('1e5000') for x in honest]",
    "fraction": "import fractions; return [fractions.Fraction(10**400, 3) for x in honest]",
    "lying float": "return [Lying(x) for x in honest]",
    "lying integer": "return [LyingInt(3) for x in honest]",
    "lying list": "return LyingList(honest)",
    "endless": "import itertools; return itertools.repeat(1.0)",
    "pickle": "return [Pickled() for x in honest]",
    "item": "return [Item() for x in honest]",
    "endless item": "return [Endless() for x in honest]",
    "coroutine": "async def g(): return honest\n    return g()",
    "raises odd": "raise odd_error()",
    "raises unprintable": "raise Unprintable()",
    "raises surrogate": "raise ValueError(chr(0xd800))",
    "raises group": "raise BaseExceptionGroup('g', [KeyboardInterrupt()])",
    "raises generator exit": "raise GeneratorExit",
    "raises deep": "raise deep(5000)",
    "forks": "os.fork(); return honest",
    "forks and waits": "if os.fork(): time.sleep(0.3)\n    return honest",
    "forks 3": "[os.fork() for _ in range(3)]; return honest",
    "leaves children": "subprocess.Popen(['sleep', '1000']); return honest",
    "thread": "threading.Thread(target=time.sleep, args=(1000,)).start(); return honest",
    "threads later write": "threading.Thread(target=later).start(); return honest",
    "noise to descriptors": "scribble(b'rubbish\\n' * 3); return honest",
    "json to descriptors": "scribble(b'[\"scores\", [1, 1, 1, 1]]\\n'); return honest",
    "bytes to descriptors": "scribble(bytes(range(256)) * 40); return honest",
    "length to descriptors": "scribble(b'\\x7f\\xff\\xff\\xff'); return honest",
    "half a frame": "scribble(b'\\x00\\x00\\x00\\x40{'); return honest",
    "megabytes to descriptors": "scribble(b'x' * 5_000_000); return honest",
    "reads descriptors": "slurp(); return honest",
    "closes descriptors": "os.closerange(0, 100); return honest",
    "closes sockets": "os.closerange(3, 100); return honest",
    "prints much": "[print('x' * 1_000_000) for _ in range(100)]; return honest",
    "prints odd": "print(chr(27) + '[31m' + chr(0x202e)); return honest",
    "prints bytes": "os.write(1, bytes(range(256))); return honest",
    "prints for ever": "while True: print('x' * 100_000)",
    "memory": "state.append(bytearray(2_000_000_000)); return honest",
    "memory for ever": "while True: state.append(bytearray(200_000_000))",
    "changes input": "completions.clear(); prompts.clear(); return honest",
    "changes directory": "os.chdir('/'); return honest",
    "removes directory": "import shutil; shutil.rmtree(os.getcwd(), ignore_errors=True); return honest",
    "ignores signals": "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32)); time.sleep(1000)",
    "patches json": "json.dumps = json.loads = lambda *a, **k: '[]'; return honest",
    "patches math": "math.isfinite = lambda x: True; return [float('nan') for x in honest]",
    "patches builtins": "builtins.float = builtins.len = builtins.list = None; return honest",
    "ends stdout": "sys.stdout.close(); sys.stderr.close(); sys.stdout = sys.stderr = None; return honest",
    "alarm": "signal.alarm(1); return honest",
    "at exit": "atexit.register(time.sleep, 1000); return honest",
    "limits": "resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0)); return honest",
    "kills parent's children": "os.killpg(0, 9)",
    "new session": "os.setsid() if os.getpid() != os.getsid(0) else None; return honest",
}

# What a module does while it is loaded, before the function is defined.
HEADS: dict[str, str] = {
    "raises": "raise ValueError('no')",
    "raises odd": "raise ValueError(chr(27) + chr(0x202e) + '\\n\\n')",
    "raises long": "raise ValueError('x' * 1_000_000)",
    "exits": "sys.exit(3)",
    "exits hard": "print('because of this', flush=True); os._exit(3)",
    "killed": "os.kill(os.getpid(), 9)",
    "segfault": "os.kill(os.getpid(), signal.SIGSEGV)",
    "interrupts": "raise KeyboardInterrupt",
    "closes": "os.closerange(3, 100)",
    "closes all": "os.closerange(0, 100)",
    "noise": "print('x' * 1_000_000)",
    "noise to descriptors": "scribble(b'rubbish\\n')",
    "ready to descriptors": "scribble(b'[\"ready\", null]\\n')",
    "forks": "os.fork()",
    "recurses": "def g(): g()\ng()",
    "missing": "import no_such_module",
    "raises in generator": "raise StopIteration",
    "user error": "from qarl.errors import UserError; raise UserError('a\\nb')",
    "thread": "threading.Thread(target=time.sleep, args=(1000,)).start()",
    "memory": "x = bytearray(1_000_000_000)",
    "changes directory": "os.chdir('/')",
    "patches": "import qarl.rewards.worker as w; w.checked = None",
    "syntax": "def (",
    "unprintable": "raise Unprintable()",
    "nul": "\0",
    "indent": "\tx\n  y",
    "deep": "[" * 5_000 + "]" * 5_000,
}

# What stands where the function should.
OBJECTS: dict[str, str] = {
    "nothing": "",
    "number": "f = 5",
    "class": "class f:\n    def __init__(self, completions, prompts, **columns): pass",
    "lambda": "f = lambda completions, prompts, **columns: [1.0] * len(completions)",
    "no columns": "def f(completions, prompts): return [1.0] * len(completions)",
    "positional only": "def f(completions, prompts, /, **columns): return [1.0] * len(completions)",
    "wants a column": "def f(completions, prompts, nosuch, **columns): return [1.0] * len(completions)",
    "coroutine": "async def f(completions, prompts, **columns): return [1.0] * len(completions)",
    "generator": "def f(completions, prompts, **columns):\n    yield from [1.0] * len(completions)",
    "builtin": "f = len",
    "partial": "import functools\nf = functools.partial(lambda a, completions, prompts, **c: [1.0] * len(prompts), 1)",
    "callable": "class C:\n    def __call__(self, completions, prompts, **c): return [1.0] * len(completions)\nf = C()",
    "no signature": "f = type",
    "raises when called": "class C:\n    def __getattr__(self, name): raise ValueError(name)\nf = C()",
    "module": "f = os",
    "endless signature": "class S:\n    @property\n    def __signature__(self): raise RuntimeError('no')\nf = S()",
    "defaults": "def f(completions, prompts, *args, a=1, **kwargs): return [1.0] * len(completions)",
}

FUNCTION = """\
def f(completions, prompts, **columns):
    honest = [float(len(c)) for c in completions]
"""
PRELUDE = """\
import atexit, builtins, json, math, os, resource, signal, subprocess, sys, threading, time
state = []
class Lying(float):
    def __float__(self): return float('nan')
    def __repr__(self): return chr(27) + '[31m'
    def __reduce__(self): return (os._exit, (3,))
class LyingInt(int):
    def __reduce__(self): return (os._exit, (3,))
    def __repr__(self): raise ValueError('no')
class LyingList(list):
    def __len__(self): return 10**18
    def __iter__(self): return iter(range(10**18))
class Pickled:
    def item(self): return self
    def __reduce__(self): return (os._exit, (3,))
class Item:
    def item(self): raise KeyboardInterrupt
class Endless:
    def item(self):
        while True: pass
class Unprintable(Exception):
    def __str__(self): raise RuntimeError('no text')
    __repr__ = __str__
def odd_error():
    return type('E' + chr(0x202e), (Exception,), {'__str__': lambda s: chr(27) + '[31m' + 'x' * 100000})()
def deep(depth):
    error = ValueError('bottom')
    for _ in range(depth):
        outer = ValueError('outer'); outer.__cause__ = error; error = outer
    return error
def scribble(data):
    for fd in range(3, 40):
        try:
            os.set_blocking(fd, False); os.write(fd, data)
        except OSError: pass
def slurp():
    for fd in range(3, 40):
        try:
            os.set_blocking(fd, False); os.read(fd, 1000)
        except OSError: pass
def later():
    time.sleep(0.2); scribble(b'late')
"""
# Bodies whose scores are not the honest ones: each of them is no finite number, or comes too late.
SCORES_NOTHING = (
    "raises",
    "exits",
    "exits hard",
    "interrupts",
    "killed",
    "segfault",
    "recurses",
    "sleeps",
    "spins",
    "stops for long",
    "stops itself",
    "none",
    "dict",
    "dict of completions",
    "string",
    "bytes",
    "number",
    "short",
    "long",
    "empty",
    "nested",
    "strings",
    "nones",
    "nan",
    "infinity",
    "huge integer",
    "digits",
    "complex",
    "decimal",
    "fraction",
    "endless",
    "pickle",
    "item",
    "endless item",
    "coroutine",
    "raises odd",
    "raises unprintable",
    "raises surrogate",
    "raises group",
    "raises generator exit",
    "raises deep",
    "ignores signals",
    "prints for ever",
    "set",
)
OWN_SCALE = (
    "1e308",
    "1e308 both ways",
    "1e200",
    "1e39",
    "3e38",
    "1e-320",
    "honest, bool",
    "lying integer",
    "lying float",
    "lying list",
    "patches math",
)
