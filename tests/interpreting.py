"""Triton's interpreter as tests have it: without work that it repeats, which is more than half of a test's time."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

from triton import language
from triton.language import semantic
from triton.runtime import interpreter


def prepare() -> None:
    """Change the interpreter of this process. Where another Triton's is built otherwise, it stays as slow as it is."""
    for change in (_patch_once_a_launch, _look_dtypes_up_once, _share_shapes, _promote_once, _leave_overflows):
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
    """A block's type is made for every result, and checks its shape as if it were new; a tensor wraps it once more.

    Blocks of one shape have the same object for it, by which operands are known to need no broadcast.
    """
    real, broadcast = language.block_type.__init__, semantic.TritonSemantic.broadcast_impl_value
    made: dict[tuple[int, ...], tuple[Any, int]] = {}  # sizes -> shape as Triton has it, number of elements
    names: dict[tuple[tuple[int, ...], str], str] = {}
    wrapped: dict[int, tuple[Any, Any, Any]] = {}  # id of a shape of `made` -> it, a tensor's shape and numel
    scalar = (), language.constexpr(1)

    def make(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in getattr(shape, "values", shape))
        if sizes not in made:
            real(self, element_ty, shape)
            made[sizes] = self.shape, self.numel
        self.element_ty = element_ty
        self.shape, self.numel = made[sizes]
        key = sizes, element_ty.name
        if key not in names:
            names[key] = f"<{self.shape}, {element_ty}>"
        self.name = names[key]

    def fill(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if not type.is_block():
            self.shape, self.numel = scalar
            return
        if id(type.shape) not in wrapped:
            sizes = tuple(language.constexpr(size) for size in type.shape)
            wrapped[id(type.shape)] = type.shape, sizes, language.constexpr(type.numel)
        _, self.shape, self.numel = wrapped[id(type.shape)]

    def broadcast_unless_alike(self: Any, lhs: Any, rhs: Any) -> Any:
        if getattr(lhs.type, "shape", None) is getattr(rhs.type, "shape", None):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    language.block_type.__init__, language.tensor.__init__ = make, fill
    semantic.TritonSemantic.broadcast_impl_value = broadcast_unless_alike


def _promote_once() -> None:
    """The type that an operation computes in follows from those of its operands; types are compared by their names."""
    real, equal = semantic.TritonSemantic.computation_type_impl, language.dtype.__eq__
    known: dict[tuple[Any, ...], Any] = {}

    def promote(self: Any, a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod
        if key not in known:
            known[key] = real(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return known[key]

    semantic.TritonSemantic.computation_type_impl = promote
    language.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
