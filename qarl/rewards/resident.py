"""Memory of a process and its descendants, and whether a process is exiting, from /proc."""

from __future__ import annotations

from pathlib import Path

_PF_EXITING = 0x4  # linux/sched.h
_OWN = ("RssAnon:", "RssShmem:")  # not RssFile: the kernel can drop the pages of libraries


def resident_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants; 0 without /proc or if it has ended.

    Pages that a fork still shares with its parent count for both.
    """
    total, waiting = 0, [pid]
    while waiting:
        folder = Path(f"/proc/{waiting.pop()}")
        try:
            status = (folder / "status").read_text(errors="replace")
            total += sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(_OWN))
            for thread in (folder / "task").iterdir():
                waiting += map(int, (thread / "children").read_text().split())
        except OSError:
            continue
    return total


def ends(pid: int) -> bool:
    """Return whether an unreaped process no longer runs; False without /proc.

    The kernel closes a process's connections before it can be reaped, on a busy machine a second before.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return False
    return bool(int(fields[6]) & _PF_EXITING)
