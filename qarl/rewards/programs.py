"""The built-in reward `code`: runs the program in a response against tests, in a sandbox."""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import re
import textwrap
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from qarl.errors import UserError
from qarl.rewards.builtin import ground_truths
from qarl.rewards.code_sandbox import Isolation, Limits, require_sandbox, run_program
from qarl.rewards.responses import THINK_TAGS, after_thinking, check_tags

_BLOCK = re.compile(r"```[ \t]*([\w+#-]*)[^\n]*\n(.*?)```", re.DOTALL)
_PYTHON = {"py", "python", "python3"}
_MARK = "qarl-result:"
# Runs a program and calls one of its functions; the arguments are on standard input, one JSON value per line.
# It imports what LeetCode and LiveCodeBench import, because the starter code of their tasks uses such names (`List`).
_CALL = f"""
from string import *
from re import *
from datetime import *
from collections import *
from heapq import *
from bisect import *
from copy import *
from math import *
from random import *
from statistics import *
from itertools import *
from functools import *
from operator import *
from builtins import *
from typing import *
import bisect, collections, copy, datetime, functools, heapq, itertools
import math, operator, random, re, statistics, string, sys

sys.setrecursionlimit(50000)
_qarl_program = {{program!r}}
if "class Solution" not in _qarl_program:
    globals().pop({{name!r}}, None)  # such as gcd: the program must define it
exec(compile(_qarl_program, "program.py", "exec", dont_inherit=True))

def _qarl_call():
    import json, sys
    arguments = [json.loads(line) for line in sys.stdin.read().splitlines() if line.strip()]
    name = {{name!r}}
    target = getattr(Solution(), name) if "Solution" in globals() else globals()[name]
    print("\\n{_MARK}" + json.dumps(target(*arguments)))

_qarl_call()
"""


@dataclass(frozen=True)
class Test:
    """One test.

    Attributes:
        given: Standard input.
        expected: Standard output; with `function`, its result as JSON.
        function: Function to call with the JSON lines of `given`; None: run the whole program.
        wrapped: Whether `expected` may be a list whose only item is the result.
    """

    given: str
    expected: str
    function: str | None = None
    wrapped: bool = False


def code(
    completions: list[str],
    prompts: list[str],
    *,
    column: str | list[str] = "tests",
    metadata_column: str | None = None,
    partial: bool = False,
    max_tests: int | None = None,
    timeout_s: float = 6.0,
    memory_mib: int = 1024,
    parallel: int = 4,
    isolation: Literal["namespace", "process"] = "namespace",
    think_tags: Sequence[str] | None = THINK_TAGS,
    **columns: list,
) -> list[float]:
    """Score 1 if the program in the response passes all tests, else 0. The program is the last Python block.

    Args:
        completions: Responses.
        prompts: Their prompts.
        column: Data column of the tests, see `read_tests`, or several columns whose tests are concatenated.
        metadata_column: Data column with LiveCodeBench's metadata, which names the function to call.
        partial: Score the fraction of passed tests instead.
        max_tests: Use only the first tests of each row; None: all.
        timeout_s: Wall-clock and CPU seconds per test.
        memory_mib: Address space per process.
        parallel: Number of programs that run concurrently.
        isolation: `namespace`, or `process` for machines without user namespaces: the same resource limits, but
            programs can access the network and the user's files.
        think_tags: Score only the text after a think block with these tags; None: the whole response.
        columns: Data columns.

    Returns:
        One score per response. A response without a program scores 0.
    """
    check_tags(think_tags)
    for name, value in {"timeout_s": timeout_s, "memory_mib": memory_mib, "parallel": parallel}.items():
        if not 0 < value < 1e6:
            raise UserError(f"{name} must be a positive number, got {value!r}")
    if max_tests is not None and max_tests < 1:
        raise UserError(f"max_tests must be a positive integer or null, got {max_tests!r}")
    names = [column] if isinstance(column, str) else list(column)
    rows = list(zip(*(ground_truths(columns, name, objects=True) for name in names), strict=True))
    details = [None] * len(rows) if metadata_column is None else ground_truths(columns, metadata_column, objects=True)
    require_sandbox(isolation)
    limits = Limits(wall_s=timeout_s, cpu_s=max(1, round(timeout_s)), memory_bytes=memory_mib << 20)
    jobs = []
    for completion, prompt, row, detail in zip(completions, prompts, rows, details, strict=True):
        answer_part = after_thinking(completion, prompt, think_tags)
        program = None if answer_part is None else last_program(answer_part)
        tests = [test for part in row for test in read_tests(part, detail)]
        jobs.append((program, tests[:max_tests]))

    def score(job: tuple[str | None, list[Test]]) -> float:
        program, tests = job
        if program is None:
            return 0.0
        passed = 0
        for test in tests:
            good = passes(program, test, limits, isolation)
            if not good and not partial:
                return 0.0
            passed += good
        return passed / len(tests)

    with ThreadPoolExecutor(parallel) as pool:
        return list(pool.map(score, jobs))


def last_program(text: str) -> str | None:
    """Return the last fenced block marked as Python, or else the last one without a language; None if there is none."""
    blocks = [(language.lower(), textwrap.dedent(body)) for language, body in _BLOCK.findall(text)]
    marked = [body for language, body in blocks if language in _PYTHON]
    unmarked = [body for language, body in blocks if not language]  # often the program's output
    found = marked or unmarked
    return found[-1] if found else None


def read_tests(row: Any, metadata: Any = None) -> list[Test]:
    """Parse the tests of a row: a mapping, a list, or their JSON text.

    Mapping (APPS, TACO, PRIME): {"inputs": [...], "outputs": [...], "fn_name": optional name}. With fn_name, an input
    is a list of arguments and an output is the result, possibly in a list of one.

    List (LiveCodeBench): [{"input": text, "output": text, "testtype": "stdin" or "functional"}]. A functional input has
    one JSON argument per line, and `metadata` has {"func_name": name}. Private tests, stored as compressed text, are
    supported.

    Raises:
        ValueError: The row has no tests, or they have another format.
    """
    tests = _opened(row)
    if isinstance(tests, dict):
        inputs, outputs, name = tests.get("inputs"), tests.get("outputs"), tests.get("fn_name")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError("tests must have `inputs` and `outputs`, two lists of equal length")
        found = [_of_pair(given, wanted, name) for given, wanted in zip(inputs, outputs, strict=True)]
    elif isinstance(tests, list):
        details = _opened(metadata) if metadata is not None else {}
        name = details.get("func_name") if isinstance(details, dict) else None
        found = [_of_livecodebench(test, name) for test in tests]
    else:
        raise ValueError(f"tests must be a mapping or a list, not {type(tests).__name__}")
    if not found:
        raise ValueError("the row has no tests")
    return found


def passes(program: str, test: Test, limits: Limits, isolation: Isolation) -> bool:
    """Run one test. The expected output never enters the sandbox."""
    if test.function is None:
        ran = run_program(program, test.given, limits, isolation)
        return ran.ok and ran.output is not None and same_output(ran.output, test.expected)
    ran = run_program(_CALL.format(program=program, name=test.function), test.given, limits, isolation)
    if not ran.ok or ran.output is None or _MARK not in ran.output:
        return False
    result = ran.output.rpartition(_MARK)[2]
    try:
        found, wanted = json.loads(result), json.loads(test.expected)
    except ValueError:
        return False
    return found == wanted or (test.wrapped and found == wanted[0])


def same_output(output: str, wanted: str) -> bool:
    """Return whether outputs have equal lines, ignoring white space at both ends, or lines of equal numbers."""
    mine, theirs = ([line.strip() for line in text.strip().splitlines()] for text in (output, wanted))
    return len(mine) == len(theirs) and all(a == b or _same_numbers(a, b) for a, b in zip(mine, theirs, strict=True))


def _same_numbers(output: str, wanted: str) -> bool:
    try:
        return [Decimal(word) for word in output.split()] == [Decimal(word) for word in wanted.split()]
    except InvalidOperation:
        return False


def _of_pair(given: Any, wanted: Any, name: str | None) -> Test:
    if name is None:
        texts = ["\n".join(map(str, x)) if isinstance(x, list) else str(x) for x in (given, wanted)]
        return Test(texts[0], texts[1])
    arguments = given if isinstance(given, list) else [given]
    wrapped = isinstance(wanted, list) and len(wanted) == 1
    return Test("\n".join(map(json.dumps, arguments)), json.dumps(wanted), name, wrapped)


def _of_livecodebench(test: Any, name: str | None) -> Test:
    if not isinstance(test, dict) or not {"input", "output"} <= test.keys():
        raise ValueError("a test must have `input` and `output`")
    functional = test.get("testtype") == "functional"
    if functional and not name:
        raise ValueError("a functional test needs the name of its function: set the option metadata_column: metadata")
    return Test(str(test["input"]), str(test["output"]), name if functional else None)


class _TextOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"tests hold an object of {module}.{name}; only text is supported")


def _opened(value: Any) -> Any:
    """Return a value, or the content of its JSON text.

    LiveCodeBench stores private tests as JSON text that is pickled, compressed with zlib and encoded in base64.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        pass
    try:
        packed = zlib.decompress(base64.b64decode(value, validate=True))
        return json.loads(_TextOnly(io.BytesIO(packed)).load())
    except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, TypeError) as error:
        raise ValueError("tests must be JSON") from error
