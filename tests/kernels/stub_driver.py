"""A driver and compiled kernels that only record launches, as on a GPU, for machines without one."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import GPUTarget


class Driver:
    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Compiled:
    """Stands for a kernel that was compiled for these arguments; `runs` has what it was launched with."""

    def __init__(self, runs: list[tuple[Compiled, tuple[Any, ...]]]) -> None:
        self.function, self.packed_metadata = len(runs), (4, 1, 0)
        self.run = Launcher(self, runs)

    def _init_handles(self) -> None: ...

    def launch_metadata(self, grid: Any, stream: int, *arguments: Any) -> None:
        return None


class Launcher:
    global_scratch_size, profile_scratch_size, launch_cooperative_grid, launch_pdl = 1, 0, False, False

    def __init__(self, compiled: Compiled, runs: list[tuple[Compiled, tuple[Any, ...]]]) -> None:
        self.compiled, self.runs = compiled, runs

    def __call__(self, *arguments: Any) -> None:
        self.runs.append((self.compiled, arguments))
