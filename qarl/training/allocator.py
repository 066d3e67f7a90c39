"""Keep freed memory in the process, on Linux CPUs.

glibc hands large blocks back to the kernel at once, and a forward asks for the same blocks again a moment later; each
page is then zeroed and mapped anew. Seen (SmolLM2, 2 cores): keeping them made learner and rollout about 15 % faster.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Tell glibc to serve large blocks from its heap and not to shrink it. Does nothing where there is no mallopt."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
