"""A disk that fills up."""

import errno
import os

import pytest


def fill_disk(patch: pytest.MonkeyPatch, after: int = 0, code: int = errno.ENOSPC) -> None:
    """Let fsync fail with that errno after that many more files, as on a full disk with delayed allocation."""
    real, seen = os.fsync, []

    def fsync(fd: int) -> None:
        seen.append(fd)
        if len(seen) > after:
            raise OSError(code, os.strerror(code))
        real(fd)

    patch.setattr(os, "fsync", fsync)
