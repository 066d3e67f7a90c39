"""Compiles kernels: orders are what `compile_case` takes, and `cache`, a directory for Triton's files."""

import os
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels cannot be compiled

import compile_cases  # noqa: F401 - imported for the forks, with torch and every kernel
import triton
import triton.experimental.gluon  # else each fork imports it, to specialise arguments
from compiling import compile_case
from qarl_kernels.launch import INTERPRETED

assert not INTERPRETED
triton.knobs.nvidia.dump_ptxas_log = True
triton.knobs.compilation.always_compile = True  # a cached kernel has no log
triton.knobs.compilation.disable_line_info = True  # the same code, sooner
triton.runtime.cache.triton_key()  # a digest of the compiler, which a fork has then


def run(cache: str, **order: Any) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = cache
    compile_case(**order)
