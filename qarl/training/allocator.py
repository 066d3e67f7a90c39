"""Keep freed memory in the process, on Linux CPUs.

glibc returns large freed blocks to the kernel immediately. The next forward allocates the same blocks again, and the
kernel zeroes and maps every page anew. Measured with SmolLM2 on 2 cores: keeping the blocks makes learner and rollout
about 15 % faster.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Tell glibc to serve large blocks from its heap and not to shrink it. No-op without mallopt."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
