"""Compile recorded kernel launches for GPUs that are not here, and read what the compiler made of them.

A test gives a `Compiler` cases, "module:function" with ":" and more strings as the function's arguments. The function
is a generator: it calls the kernels' Python wrappers on CPU (or meta) tensors and yields a label after each call. It
runs once per capability inside `qarl_kernels.launch.recording`, so nothing executes; every launch since the last yield
belongs to that label. Triton's own binder specialises the arguments, so that what is compiled is what a GPU would run.
This needs a process of its own, `compile_server`: with TRITON_INTERPRET=1, which the test suite sets, `@triton.jit`
makes functions that cannot be compiled.
"""

import contextlib
import importlib
import io
import json
import multiprocessing
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import triton
from forks import Fork
from qarl_kernels.launch import Launch, recording
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.errors import TritonError
from triton.runtime.jit import create_function_from_signature

ROOT = Path(__file__).parents[2]
# Bytes of shared memory of one block: 99 and 227 KiB. sm_80 has 163, but its code is what sm_86 and sm_89 run too.
SHARED_LIMIT = {(8, 0): 101_376, (8, 9): 101_376, (9, 0): 232_448, (12, 0): 101_376}
SPILL_LIMIT = 64  # bytes of a thread, set aside outside the loop: the fastest tile of w4a16 has 52 with Triton 3.9
# What ptxas makes of a matrix product, by the dtype of its operands: HMMA, or of a warpgroup HGMMA.
MATRIX_LETTERS = {"bf16": "H", "f16": "H", "tf32": "H", "s8": "I", "e4m3": "Q", "e5m2": "Q"}


@dataclass(frozen=True)
class Compiled:
    """One kernel, specialised for one launch (`label`: what the generator yielded) and one compute capability.

    Args:
        constants: constexpr arguments by name, as strings; also integers of value 1 and None, which Triton folds.
        shared, registers: bytes of shared memory of a block; registers of a thread.
        spill_stores, spill_loads: bytes, as ptxas counts them.
        instructions: of the PTX, by full name ("ld.global.v4.b32").
        serialized: ptxas says that it serialised wgmma instructions (messages C75xx).
        adjacent: values along the summed axis that a thread hands a warp's tensor core together, in 16-bit products 2
            where operands were loaded as such; other numbers sum in another order.
        error: why it did not compile; empty if it did, and then the numbers above hold.
    """

    label: str
    kernel: str
    capability: tuple[int, int]
    options: dict[str, Any]
    constants: dict[str, str]
    shared: int = 0
    registers: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    instructions: dict[str, int] = field(default_factory=dict)
    serialized: bool = False
    adjacent: list[int] = field(default_factory=list)
    error: str = ""

    @property
    def name(self) -> str:
        major, minor = self.capability
        return f"{self.label}: {self.kernel} sm_{major}{minor} {self.options} {self.constants}"

    def count(self, name: str) -> int:
        """How many PTX instructions whose name starts so."""
        return sum(count for full, count in self.instructions.items() if full.startswith(name))

    @property
    def products(self) -> set[str]:
        """SASS's names of the tensor cores' instructions that it has: "HMMA", or of a warpgroup "HGMMA"."""
        found = set()
        for name in self.instructions:
            base, *parts = name.split(".")
            if base == "mma" or name.startswith("wgmma.mma_async"):
                letter = next(MATRIX_LETTERS[part] for part in parts if part in MATRIX_LETTERS)
                found.add(letter + ("MMA" if base == "mma" else "GMMA"))
        return found

    def problems(self) -> list[str]:
        """What would make this launch fail or crawl, in words; empty if nothing."""
        if self.error:
            return [f"{self.name}: {self.error}"]
        found = []
        limit = SHARED_LIMIT[self.capability]
        if self.shared > limit:
            found.append(f"{self.shared} bytes of shared memory, a block has {limit}")
        if max(self.spill_stores, self.spill_loads) > SPILL_LIMIT:
            found.append(f"spills {self.spill_stores} bytes out and {self.spill_loads} in")
        if self.serialized:
            found.append("wgmma instructions are serialised")
        return [f"{self.name}: {problem}" for problem in found]


def specialise(launch: Launch, target: GPUTarget) -> tuple[ASTSource, Any]:
    """What `JITFunction.run` compiles for this launch on `target`: the source with its specialised arguments, options.

    Bound by the JIT's own functions: pointer types from tensor dtypes, divisibility by 16 of addresses and integers,
    integers of value 1 and None folded, tensor descriptors as `tensordesc<dtype[block]>`.
    """
    kernel, backend = launch.kernel, make_backend(target)
    given = {**launch.arguments, **launch.options}
    bound, specialisation, extra = create_function_from_signature(kernel.signature, kernel.params, backend)(**given)
    options, signature, constants, attributes = kernel._pack_args(backend, given, bound, specialisation, extra)
    return ASTSource(kernel, signature, constants, attributes), options


def _target(capability: tuple[int, int]) -> GPUTarget:
    return GPUTarget("cuda", capability[0] * 10 + capability[1], 32)


def instructions_of(ptx: str) -> dict[str, int]:
    """How often each instruction stands in a PTX text."""
    return dict(Counter(re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z]\w*(?:\.[\w:]+)+)\s", ptx, re.MULTILINE)))


def _number(pattern: str, log: str) -> int:
    return max((int(value) for value in re.findall(pattern, log)), default=0)


@dataclass(frozen=True)
class _Job:
    label: str
    kernel: str
    capability: tuple[int, int]
    launch_options: dict[str, Any]
    source: ASTSource
    options: Any

    def run(self) -> Compiled:
        signature = list(self.source.signature)
        constants = {signature[path[0]]: str(value) for path, value in self.source.constants.items()}
        made = Compiled(self.label, self.kernel, self.capability, self.launch_options, constants)
        print(f"compiling {made.name}", file=sys.stderr, flush=True)  # the last line if the compiler crashes
        target = _target(self.capability)
        log = io.StringIO()
        try:
            with contextlib.redirect_stdout(log):  # Triton prints the log of `ptxas -v` there
                kernel = triton.compile(self.source, target=target, options=self.options.__dict__)
        except (RuntimeError, TritonError) as error:  # the passes', ptxas's and the frontend's errors
            return Compiled(**(asdict(made) | {"error": f"{type(error).__name__}: {error}"}))
        text = log.getvalue()
        assert "registers" in text, f"{made.name}: no log of ptxas, was it cached?"
        return Compiled(
            **asdict(made)
            | {
                "shared": kernel.metadata.shared,
                "registers": _number(r"Used (\d+) registers", text),
                "spill_stores": _number(r"(\d+) bytes spill stores", text),
                "spill_loads": _number(r"(\d+) bytes spill loads", text),
                "instructions": instructions_of(kernel.asm["ptx"]),
                "serialized": re.search(r"\(C75\d\d\)", text) is not None,
                "adjacent": sorted({int(number) for number in re.findall(r"kWidth = (\d+)", kernel.asm["ttgir"])}),
            }
        )


def _jobs(case: str, capabilities: Iterable[tuple[int, int]]) -> Iterator[_Job]:
    """Record the generator's launches for every capability; launches that compile to the same kernel are one job."""
    module, function, *arguments = case.split(":")
    generator = getattr(importlib.import_module(module), function)
    for capability in capabilities:
        target = _target(capability)
        seen: set[tuple[str, str]] = set()
        with recording(capability) as launches:
            for label in generator(*arguments):
                for launch in launches:
                    source, options = specialise(launch, target)
                    key = source.hash(), options.hash()
                    if key not in seen:
                        seen.add(key)
                        yield _Job(label, launch.kernel.__name__, capability, launch.options, source, options)
                launches.clear()
            assert not launches, f"{case}: launches after the last yield have no label"


def spread(jobs: Iterable[_Job]) -> list[_Job]:
    """Per capability, kernel and first word of the labels the last launch: launches of one word differ in little."""
    return list({(job.capability, job.kernel, job.label.split()[0]): job for job in jobs}.values())


_pending: list[_Job] = []  # reached by forked workers: a kernel cannot be pickled


def _run(index: int) -> Compiled:
    return _pending[index].run()


def compile_case(case: str, capabilities: Sequence[Sequence[int]], processes: int) -> None:
    """Print a JSON line per kernel."""
    _pending.extend(spread(_jobs(case, [(major, minor) for major, minor in capabilities])))
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, context) as pool:  # notices a compiler that crashes, unlike a Pool
        for compiled in pool.map(_run, range(len(_pending))):
            print(json.dumps(asdict(compiled)), flush=True)


class Compiler:
    """Compiles each case once, in a fork of `compile_server`."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, tuple[tuple[int, int], ...]], list[Compiled]] = {}

    def compile(
        self, case: str, cache: Path, capabilities: Sequence[tuple[int, int]], processes: int = 2
    ) -> list[Compiled]:
        """Compile what the generator of `case` launches, once.

        cache: directory for Triton's files.
        """
        if (known := self._made.get((case, tuple(capabilities)))) is not None:
            return known
        out, err = cache / "output.out", cache / "output.err"
        order = {"case": case, "capabilities": list(capabilities), "processes": processes}
        code = Fork("compile_server", out, err, cache=str(cache), **order).wait()
        assert code == 0, f"{case}: exit code {code}: {err.read_text(errors='replace')[-4000:]}"
        lines = [json.loads(line) for line in out.read_text().splitlines() if line.startswith("{")]
        made = [Compiled(**line | {"capability": tuple(line["capability"])}) for line in lines]
        self._made[case, tuple(capabilities)] = made
        return made
