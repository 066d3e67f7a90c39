"""The reward `code`: tests of both kinds, forms of published data sets, and a sandbox that holds."""

import base64
import json
import os
import pickle
import sys
import tempfile
import time
import zlib
from pathlib import Path

import pytest

from qarl.errors import UserError
from qarl.rewards import code_sandbox
from qarl.rewards.code_sandbox import Limits, ProgramResult, require_sandbox, run_program
from qarl.rewards.programs import code, last_program, read_tests, same_output

LIMITS = Limits(wall_s=3.0)


def isolated() -> str:
    """Why there are no namespaces here; empty if there are."""
    try:
        require_sandbox("namespace")
    except UserError as error:
        return str(error)
    return ""


REASON = isolated()
namespaces = pytest.mark.skipif(bool(REASON), reason=REASON)
ISOLATION = "process" if REASON else "namespace"


def block(program: str) -> str:
    return f"Here it is.\n```python\n{program}\n```\n"


def score(program: str, tests: object, **options) -> float:
    return code([block(program)], ["p"], tests=[tests], isolation=ISOLATION, **options)[0]


STDIN = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
CALLS = {"inputs": [[1, 2], [3, 4]], "outputs": [[3], 7], "fn_name": "add"}


@pytest.mark.parametrize(
    ("program", "tests", "expected"),
    [
        ("print(sum(map(int, input().split())))", STDIN, 1.0),
        ("print('3.0', end='  ')", {"inputs": ["1 2"], "outputs": ["3"]}, 1.0),
        ("def add(a, b):\n    return a + b", CALLS, 1.0),
        ("class Solution:\n    def add(self, a, b):\n        return a + b", json.dumps(CALLS), 1.0),
        ("def add(a, b):\n    print('noise')\n    return a - b", CALLS, 0.0),
        ("class Solution:\n    def add(self, a: List[int], b) -> Optional[int]:\n        return a + b", CALLS, 1.0),
        ("from __future__ import annotations\ndef add(a, b):\n    return reduce(operator.add, [a, b])", CALLS, 1.0),
        ("def pick(x):\n    return [x]", {"inputs": [[1], [2]], "outputs": [[1], [[2]]], "fn_name": "pick"}, 1.0),
        ("def other(a, b):\n    return a + b", CALLS, 0.0),
        ("raise SystemExit(1)", STDIN, 0.0),
    ],
)
def test_a_program_passes_tests_over_standard_input_and_calls(program, tests, expected):
    assert score(program, tests) == expected


def test_the_fraction_of_passed_tests_and_a_limit_on_their_number():
    assert score("print(3)", STDIN, partial=True) == 0.5
    assert score("print(3)", STDIN, max_tests=1) == 1.0


def test_responses_without_a_finished_program_score_nothing():
    responses = ["no code", "```python\nprint(1)", "<think>```python\nprint(3)\n```", "```cpp\nprint(3)\n```"]
    assert code(responses, ["p"] * 4, tests=[{"inputs": [""], "outputs": ["3"]}] * 4, isolation=ISOLATION) == [0.0] * 4


def test_the_last_python_block_counts():
    assert last_program("```py\na\n```\n```python3 title\nb\n```\n```sh\nc\n```") == "b\n"
    assert last_program("```python\nb\n```\nIt prints:\n```\nc\n```") == "b\n" == last_program("  ```\n  b\n  ```")


def test_livecodebench_rows_are_read_in_all_their_forms():
    rows = [{"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"}]
    private = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(rows)))).decode()
    metadata = json.dumps({"func_name": "shift"})
    assert read_tests(private, metadata) == read_tests(rows, metadata) == read_tests(json.dumps(rows), metadata)
    program = "class Solution:\n    def shift(self, xs, by):\n        return [x + by for x in xs]"
    found = code(
        [block(program)], ["p"], tests=[private], extra=[metadata], metadata_column="extra", isolation=ISOLATION
    )
    assert found == [1.0]
    stdin = [{"input": "5\n", "output": "25\n", "testtype": "stdin"}]
    assert score("print(int(input()) ** 2)", stdin) == 1.0


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/qarl-unpickled",)


@pytest.mark.parametrize(
    "row",
    [
        {"inputs": ["a"], "outputs": []},
        [{"input": "a"}],
        "neither JSON nor packed",
        base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode(),
    ],
)
def test_rows_without_usable_tests_are_an_error_and_run_nothing(row):
    with pytest.raises(ValueError, match=r"tests?"):
        code([block("print(1)")], ["p"], tests=[row], isolation=ISOLATION)
    assert not Path("/tmp/qarl-unpickled").exists()


def test_outputs_agree_by_line_and_by_number():
    assert same_output("1 2 \n3\n", "1 2\n3") and same_output("0.50", "0.5") and same_output("1e2 x", "1e2 x")
    assert not same_output("1\n2", "1") and not same_output("a", "b") and not same_output("1 2", "1 3")


def test_a_machine_without_namespaces_is_told_how_to_go_on(monkeypatch, tmp_path):
    child = tmp_path / "child.py"
    child.write_text(
        "import os\nos.write(2, b'unshare: Operation not permitted; allow user namespaces')\nos._exit(125)"
    )
    monkeypatch.setattr(code_sandbox, "CHILD", child)
    require_sandbox.cache_clear()
    with pytest.raises(UserError, match=r"unshare: Operation not permitted; allow .*isolation: process"):
        code([block("print(1)")], ["p"], tests=[STDIN])
    require_sandbox.cache_clear()


@namespaces
def test_a_python_that_the_sandbox_hides_is_named(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as hidden:
        Path(hidden, "python").symlink_to(os.path.realpath(sys.executable))
        monkeypatch.setattr(sys, "executable", f"{hidden}/python")
        with pytest.raises(UserError, match=r"machine: Python \(/tmp/\S+\) is below /tmp, .*elsewhere, or set"):
            run_program("print(1)", "", LIMITS, "namespace")


# --- escapes --------------------------------------------------------------------------------------------------------

TELL = "except OSError as error:\n    print('refused')\n"
ESCAPES = {
    "writes": "for place in ('/etc/x', '/var/tmp/x', '/dev/shm/x', HERE):\n  try:\n    open(place, 'w')\n"
    "    print('written', place)\n  except OSError:\n    print('refused')",
    "connects": "import socket\ntry:\n    socket.create_connection(('127.0.0.1', PORT), 2)\n"
    f"    print('connected')\n{TELL}",
    "remounts": "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.unshare(0x10020000)\n"
    f"libc.mount(None, b'/', None, 0x1020, None)\ntry:\n    open('/etc/x', 'w')\n    print('written')\n{TELL}",
    "reads the parent": "import os\nfound = [p for p in os.listdir('/proc') if p.isdigit()]\n"
    "print('refused' if len(found) <= 3 else found)",
    "reads the environment": "import os\nprint('refused' if 'QARL_SECRET' not in os.environ else 'seen')",
}


@namespaces
@pytest.mark.parametrize("name", ESCAPES)
def test_a_program_cannot_reach_out_of_the_sandbox(name, tmp_path, monkeypatch):
    import socket

    monkeypatch.setenv("QARL_SECRET", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = ESCAPES[name].replace("HERE", repr(str(tmp_path / "x")))
        ran = run_program(program.replace("PORT", str(server.getsockname()[1])), "", LIMITS, "namespace")
    assert ran.code == 0 and set(ran.output.split()) == {"refused"}, ran
    assert not (tmp_path / "x").exists()


@namespaces
def test_what_a_program_started_ends_with_it():
    started = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(100)\nprint('started')"
    begin = time.monotonic()
    assert run_program(started, "", LIMITS, "namespace") == ProgramResult(0, "started\n")
    assert time.monotonic() - begin < 3.0


@pytest.mark.parametrize(
    "program",
    [
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        "x = bytearray(3 << 30)",
        "while True:\n    print('a' * 10_000)",
        "open('/tmp/big', 'wb').write(b'a' * (100 << 20))",
        "import time\ntime.sleep(60)",
    ],
    ids=["fork bomb", "memory", "output", "disk", "sleep"],
)
def test_a_program_that_takes_too_much_is_ended_in_time(program):
    begin = time.monotonic()
    ran = run_program(program, "", Limits(wall_s=1.0), ISOLATION)
    assert not ran.ok and time.monotonic() - begin < 8.0


def test_limits_hold_without_namespaces_too():
    assert run_program("print(input())", "text\n", LIMITS, "process") == ProgramResult(0, "text\n")
    assert not run_program("x = bytearray(3 << 30)", "", LIMITS, "process").ok
    assert not run_program("import time\ntime.sleep(60)", "", Limits(wall_s=0.5), "process").ok
