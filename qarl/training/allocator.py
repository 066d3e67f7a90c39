"""Keep freed memory in the process (glibc on Linux).

glibc returns large freed blocks to the kernel immediately. The next forward allocates the same blocks again, and the
kernel maps and zeroes every page. Keeping the blocks makes learner and rollout about 15 % faster (SmolLM2 on 2 cores).
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Make glibc serve large blocks from its heap and never shrink it. No-op without mallopt."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
