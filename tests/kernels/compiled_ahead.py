"""`python compiled_ahead.py`: launches compiled ahead, for a driver that has a target and no GPU. Prints JSON.

A process of its own: with TRITON_INTERPRET=1, which the test suite sets, kernels cannot be compiled.
"""

import json
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from qarl_kernels import launch
from qarl_kernels.ahead import compile_ahead
from triton.backends.compiler import GPUTarget

CPU = torch.device("cpu")
LOADED: list[str] = []


@triton.jit
def add_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


@triton.jit
def broken_kernel(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), no_such_name)  # noqa: F821


class Driver:
    """What Triton asks of a driver until a kernel is on its device."""

    def __init__(self) -> None:
        self.utils = SimpleNamespace(
            load_binary=self._load, get_device_properties=lambda device: {"max_shared_mem": 1 << 18}
        )
        self.launcher_cls = lambda src, metadata: SimpleNamespace()

    def _load(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        where = "the main one" if threading.current_thread() is threading.main_thread() else "a thread"
        LOADED.append(f"{name}, in {where}")
        assert binary.startswith(b"\x7fELF")
        return 1, 1, 0, 0, 1024

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def add(length: int, block: int, dtype: torch.dtype = torch.float32) -> None:
    x, out = torch.zeros(2, length, dtype=dtype)
    launch.launch(add_kernel, (1,), x=x, out=out, n=length, BLOCK=block)


def launches() -> None:
    for length in (64, 128, 1024):
        add(length, 64)
    add(64, 32)
    add(64, 64, torch.float16)
    launch.launch(broken_kernel, (1,), x=torch.zeros(8), BLOCK=8)
    launch.launch(add_kernel, (0,), x=torch.zeros(8), out=torch.zeros(8), n=0, BLOCK=8)


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    torch.cuda.device = lambda device: nullcontext()
    torch.cuda.get_device_capability = lambda device: (9, 0)
    count = compile_ahead(launches, CPU, threads=2)
    (kernels, *_) = add_kernel.device_caches[0]
    loaded, again = list(LOADED), compile_ahead(lambda: add(64, 64), CPU, threads=2)
    kinds = {type(kernel).__name__ for kernel in kernels.values()}
    print(json.dumps({"count": count, "loaded": loaded, "kinds": sorted(kinds), "kept": len(kernels), "again": again}))
    assert loaded == LOADED, "what is there is not loaded again"


if __name__ == "__main__":
    main()
