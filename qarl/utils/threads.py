"""How torch's CPU threads wait for each other. Importing it imports no torch: `wait_politely` must run before that."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

SPIN_COUNT = 10_000


def wait_politely() -> None:
    """Let OpenMP threads give up their core after a short spin at a barrier, unless the user has chosen otherwise.

    By default libgomp spins for milliseconds. Where another process wants a core, the thread that everybody waits for
    is then kept off it by the thread that waits. Seen on 2 loaded cores: 300 small products, exponentials and
    multiplications took 29 s with the default and 3 to 5 s with a short spin.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch computes on the CPU with the calling thread alone: for many small operations on a step's tokens.

    Each operation on more than 32,768 numbers ends when the last of its threads has had a core. Seen on 2 loaded cores:
    the mismatch of 131,072 tokens took 0.93 s with two threads and 0.03 s with one.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
