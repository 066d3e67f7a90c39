"""A disk that fills up."""

import errno
import os

import pytest


def fill_disk(patch: pytest.MonkeyPatch, after: int = 0, code: int = errno.ENOSPC) -> None:
    """It takes that many files more, then fsync fails with that errno, as on a disk that delays allocation."""
    real, seen = os.fsync, []

    def fsync(fd: int) -> None:
        seen.append(fd)
        if len(seen) > after:
            raise OSError(code, os.strerror(code))
        real(fd)

    patch.setattr(os, "fsync", fsync)
