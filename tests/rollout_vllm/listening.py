"""The sockets of a process that accept connections or datagrams."""

import os
from pathlib import Path

LISTEN, BOUND_UDP = "0A", "07"  # states in /proc/net/tcp and /proc/net/udp
ACCEPTS = 0x10000  # a flag in /proc/net/unix


def listening(pid: int) -> list[str]:
    """Return each listening socket of a process in the kernel's notation: `tcp 0100007F:1F90`, `unix @name`."""
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            link = os.readlink(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:
            continue
        if link.startswith("socket:["):
            inodes.add(int(link.removeprefix("socket:[").rstrip("]")))
    found = []
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in _lines(pid, kind):
            if int(line[9]) in inodes and line[3] == (LISTEN if kind.startswith("tcp") else BOUND_UDP):
                found.append(f"{kind} {line[1]}")
    for line in _lines(pid, "unix"):
        if int(line[6]) in inodes and int(line[3], 16) & ACCEPTS:
            found.append(f"unix {line[7] if len(line) > 7 else ''}")
    return found


def _lines(pid: int, kind: str) -> list[list[str]]:
    path = Path(f"/proc/{pid}/net/{kind}")
    return [line.split() for line in path.read_text().splitlines()[1:]] if path.exists() else []
