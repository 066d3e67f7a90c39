"""Triton's interpreter as tests have it: without work that it repeats, which is more than half of a test's time."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

from triton import language
from triton.runtime import interpreter


def prepare() -> None:
    """Change the interpreter of this process. Where another Triton's is built otherwise, it stays as slow as it is."""
    for change in (_patch_once_a_launch, _look_dtypes_up_once, _share_shapes, _leave_overflows):
        with contextlib.suppress(AttributeError, TypeError):
            change()


def _leave_overflows() -> None:
    """Whether an integer overflows is computed, and told to nobody."""
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _patch_once_a_launch() -> None:
    """A launch patches triton.language for the interpreter and restores it at its end. Triton does the first again for
    every call of one kernel's function in another, where it finds little to do but takes a millisecond."""
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


def _look_dtypes_up_once() -> None:
    """Each look-up makes the whole table of numpy's dtypes."""
    real, known = interpreter._get_np_dtype, functools.cache(interpreter._get_np_dtype)

    def numpy_dtype(dtype: Any) -> Any:
        dtype = dtype.element_ty if isinstance(dtype, language.block_type) else dtype
        return real(dtype) if isinstance(dtype, language.pointer_type) else known(dtype)

    interpreter._get_np_dtype = numpy_dtype


def _share_shapes() -> None:
    """A block's type is made for every result, and checks its shape as if it were new."""
    real = language.block_type.__init__
    made: dict[tuple[int, ...], tuple[Any, int]] = {}  # sizes -> shape as Triton has it, number of elements

    def make(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        if sizes not in made:
            real(self, element_ty, shape)
            made[sizes] = self.shape, self.numel
        self.element_ty = element_ty
        self.shape, self.numel = made[sizes]
        self.name = f"<{self.shape}, {element_ty}>"

    language.block_type.__init__ = make
