"""Settings of torch's CPU threads. Imports no torch, because `wait_politely` must run before that import."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

SPIN_COUNT = 10_000


def wait_politely() -> None:
    """Let OpenMP threads give up their core after a short spin at a barrier, unless the user has chosen otherwise.

    By default libgomp spins for milliseconds. If another process competes for the cores, spinning threads keep the
    thread that they wait for from running. Measured on 2 loaded cores: 300 small products, exponentials and
    multiplications took 29 s with the default and 3 to 5 s with a short spin.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))


@contextmanager
def one_thread() -> Iterator[None]:
    """Context manager: torch uses a single CPU thread, which is faster for many small operations.

    An operation on more than 32,768 numbers uses all threads and ends only after the last one was scheduled. On 2
    loaded cores the mismatch of 131,072 tokens took 0.93 s with two threads and 0.03 s with one.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
