"""Triton's interpreter without work that it repeats: more than half of the time of a test that runs kernels."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any


def repeat_less() -> None:
    """Patch triton.language once a launch and module, look numpy's dtypes up once, and compute no overflow for nobody.

    A launch patches triton.language for the interpreter and restores it at its end. Triton does the first again for
    every call of one kernel's function in another, where it finds little to do but takes a millisecond. Integers' sums
    are computed twice, to find an overflow that is told only in debug mode.
    """
    from triton import language
    from triton.runtime import interpreter

    real, launched = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] | None = None  # globals of the functions called in the launch under way

    def patch(function: Any) -> Any:
        if patched is None:
            return real(function)
        if id(function.__globals__) in patched:
            return None  # a function's call does not restore anything
        patched.add(id(function.__globals__))
        return real(function)

    def launch(self: Any, *arguments: Any, **options: Any) -> None:
        nonlocal patched
        outer, patched = patched, set()
        try:
            launched(self, *arguments, **options)
        finally:
            patched = outer

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch, launch
    plain, known = interpreter._get_np_dtype, functools.cache(interpreter._get_np_dtype)

    def numpy_dtype(dtype: Any) -> Any:
        dtype = dtype.element_ty if isinstance(dtype, language.block_type) else dtype
        return plain(dtype) if isinstance(dtype, language.pointer_type) else known(dtype)

    interpreter._get_np_dtype = numpy_dtype
    options = interpreter.interpreter_builder.options
    assert not options.debug, "an overflow would be told"
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
