"""Detect out-of-memory errors and report them in one line. Imports no torch."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from qarl.errors import UserError

# Messages of torch (GPU and CPU) and of drivers, which raise several classes of RuntimeError.
_SAID = ("can't allocate memory", "not enough memory", "cannot allocate memory", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error reports that the host or a GPU ran out of memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, for a GPU
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(said in str(error).lower() for said in _SAID)


@contextmanager
def memory_errors(fix: str) -> Iterator[None]:
    """Convert out-of-memory errors to a one-line UserError.

    Args:
        fix: Advice at the end of the message: the setting to lower.

    Raises:
        UserError: The body ran out of memory.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        said = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise UserError(f"out of memory ({said}); {fix}") from error
