"""Faults that are neither the user's nor qarl's: a machine without enough memory."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from qarl.errors import UserError

# What torch says on the CPU, in a plain RuntimeError, and what drivers say.
_SAID = ("can't allocate memory", "not enough memory", "cannot allocate memory", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a machine or a GPU refused memory, in any of the classes that say so."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(said in str(error).lower() for said in _SAID)


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn running out of memory into a one-line UserError with what to lower."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        said = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise UserError(
            f"out of memory ({said}); lower train.micro_batch_tokens, rollout.max_num_seqs or rollout.kv_cache_tokens, "
            "set train.recompute: layer, or take a larger machine; `qarl check` estimates what a run needs"
        ) from error
