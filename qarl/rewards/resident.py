"""How much memory a process and its descendants hold, and whether it is ending, from /proc."""

from __future__ import annotations

from pathlib import Path

_PF_EXITING = 0x4  # of linux/sched.h
_OWN = ("RssAnon:", "RssShmem:")  # not RssFile: a library's pages are the kernel's to drop


def resident_bytes(pid: int) -> int:
    """Memory of the process and of all below it; 0 where there is no /proc, and for what has ended meanwhile.

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
    """Whether a process that has not been waited for runs nothing any more; False where there is no /proc.

    The kernel closes its connections before it can be waited for: on a busy machine a second before.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return False
    return bool(int(fields[6]) & _PF_EXITING)
