"""Speed up Triton's interpreter for tests: skip repeated work, which takes more than half of a test's time."""

import contextlib
import dataclasses
import functools
from typing import Any, NamedTuple

from triton import language
from triton.runtime import interpreter


def prepare() -> None:
    """Patch the interpreter of this process. The interpreter of another Triton version may stay unpatched and slow."""
    for change in (_patch_once_a_launch, _look_dtypes_up_once, _share_shapes, _leave_overflows):
        with contextlib.suppress(AttributeError, TypeError):
            change()


def _leave_overflows() -> None:
    """Skip the detection of integer overflows, whose result is not used."""
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
    """Cache dtype look-ups, each of which builds the whole table of numpy's dtypes."""
    real, known = interpreter._get_np_dtype, functools.cache(interpreter._get_np_dtype)

    def numpy_dtype(dtype: Any) -> Any:
        dtype = dtype.element_ty if isinstance(dtype, language.block_type) else dtype
        return real(dtype) if isinstance(dtype, language.pointer_type) else known(dtype)

    interpreter._get_np_dtype = numpy_dtype


def _share_shapes() -> None:
    """Cache the shapes of blocks, which are checked and wrapped again for every result."""
    real = language.block_type.__init__
    made: dict[tuple[int, ...], _Shape] = {}
    held: dict[int, _Shape] = {}  # by the id of what Triton has as a shape, all of which `made` keeps

    def make(self: Any, element_ty: Any, shape: Any) -> None:
        if (found := held.get(id(shape))) is None:
            sizes = tuple(getattr(size, "value", size) for size in shape)
            if (found := made.get(sizes)) is None:
                real(self, element_ty, shape)
                constants = language.tuple([language.constexpr(size) for size in self.shape])
                found = made[sizes] = _Shape(self.shape, self.numel, str(self.shape), constants)
                held[id(found.shape)] = found
        self.element_ty, self.shape, self.numel = element_ty, found.shape, found.numel
        self.name = f"<{found.text}, {element_ty}>"

    real_tensor = language.tensor.__init__

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        if not isinstance(type, language.block_type) or (found := held.get(id(type.shape))) is None:
            real_tensor(self, handle, type)
            return
        self.handle, self.type, self.dtype = handle, type, type.element_ty
        self.shape, self.numel = found.constants, language.constexpr(found.numel)

    semantic = interpreter.TritonSemantic
    real_broadcast = semantic.broadcast_impl_value

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        alike = isinstance(lhs.type, language.block_type) and isinstance(rhs.type, language.block_type)
        return (lhs, rhs) if alike and lhs.type.shape is rhs.type.shape else real_broadcast(self, lhs, rhs)

    language.block_type.__init__, language.tensor.__init__ = make, make_tensor
    semantic.broadcast_impl_value = broadcast


class _Shape(NamedTuple):
    """shape: as Triton has it. numel: number of elements. text: the shape's. constants: what tensors have as theirs."""

    shape: Any
    numel: int
    text: str
    constants: Any
