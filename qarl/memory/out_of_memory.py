"""A fault that is neither the user's nor qarl's: a machine without enough memory. Imports no torch."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from qarl.errors import UserError

# What torch says of a GPU and on the CPU, in RuntimeErrors of several classes, and what drivers say.
_SAID = ("can't allocate memory", "not enough memory", "cannot allocate memory", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a machine or a GPU refused memory, in any of the classes that say so."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, of a GPU
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(said in str(error).lower() for said in _SAID)


@contextmanager
def memory_errors(fix: str) -> Iterator[None]:
    """Turn running out of memory into a one-line UserError. fix: what to lower."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        said = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise UserError(f"out of memory ({said}); {fix}") from error
