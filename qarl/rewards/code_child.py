"""Run one untrusted Python program in a sandbox. A standalone script that does not import qarl.

    python -I -S code_child.py LIMITS < JOB    # both JSON; JOB is {"program": ..., "stdin": ...}

With `namespaces` the program gets its own user, mount, process, network and IPC namespaces. The file system is
read-only except for an empty in-memory /tmp, /proc shows only the program's processes, there is no network, and all its
processes are killed when it ends. It has no capabilities: its user is not root and `exec` drops them. Without
namespaces it runs in `directory` with the same limits on CPU, memory, files and processes.

The exit code is the program's, or 125 if the sandbox could not be set up; stderr then has the reason.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable

SETUP_FAILED = 125
_USER, _MOUNT, _PROCESS, _NETWORK, _IPC, _UTS = 0x10000000, 0x20000, 0x20000000, 0x40000000, 0x08000000, 0x04000000
_READ_ONLY, _NO_SUID, _NO_DEV, _NO_EXEC, _PRIVATE, _RECURSIVE = 0x1, 0x2, 0x4, 0x8, 0x40000, 0x4000
_MOUNT_SETATTR, _AT_RECURSIVE, _AT_CWD = 442, 0x8000, -100
_DEATH_SIGNAL, _NO_NEW_PRIVILEGES = 1, 38
_INSIDE = 1000  # user id inside the namespace; not root

libc = ctypes.CDLL(None, use_errno=True)


class _Attributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


def _checked(what: str, result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _reason(error: BaseException) -> bytes:
    fix = "" if isinstance(error, FileNotFoundError) else "; allow user namespaces"
    return f"{error}{fix}\n".encode(errors="replace")


def _mount(kind: bytes, place: bytes, flags: int, options: bytes | None = None) -> None:
    _checked(f"mount {place.decode()}", libc.mount(kind, place, kind, flags, options))


def enter_namespaces() -> None:
    """Create the namespaces and map the current user to a non-root user inside."""
    user, group = os.getuid(), os.getgid()
    _checked("unshare", libc.unshare(_USER | _MOUNT | _PROCESS | _NETWORK | _IPC | _UTS))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{_INSIDE} {user} 1"), ("gid_map", f"{_INSIDE} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def close_file_system(scratch_bytes: int) -> None:
    """Make everything read-only except an empty /tmp, and hide other processes."""
    _checked("private mounts", libc.mount(None, b"/", None, _RECURSIVE | _PRIVATE, None))
    attributes = _Attributes(set=_READ_ONLY)
    done = libc.syscall(
        _MOUNT_SETATTR, _AT_CWD, b"/", _AT_RECURSIVE, ctypes.byref(attributes), ctypes.sizeof(attributes)
    )
    _checked("read-only file system", done)
    _mount(b"tmpfs", b"/tmp", _NO_SUID | _NO_DEV, b"size=%d,mode=777" % scratch_bytes)
    if not os.path.exists(sys.executable):
        raise FileNotFoundError(
            f"Python ({sys.executable}) is below /tmp, which the sandbox hides; install it elsewhere"
        )
    try:
        _mount(b"proc", b"/proc", _NO_SUID | _NO_DEV | _NO_EXEC)
    except OSError:  # not permitted in a container that masks parts of /proc
        _mount(b"tmpfs", b"/proc", _READ_ONLY | _NO_SUID | _NO_DEV, b"size=0")


def run_program(job: dict, limits: dict) -> None:
    """Replace this process with the program."""
    directory = "/tmp" if limits["namespaces"] else limits["directory"]
    os.chdir(directory)
    for name, text in (("main.py", job["program"]), ("stdin", job["stdin"])):
        with open(name, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
    stdin, nothing = os.open("stdin", os.O_RDONLY), os.open(os.devnull, os.O_WRONLY)
    cpu = limits["cpu_s"]
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_AS, limits["memory_bytes"], limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"], limits["file_bytes"]),
        (resource.RLIMIT_NPROC, limits["processes"], limits["processes"]),
        (resource.RLIMIT_NOFILE, 128, 128),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        resource.setrlimit(kind, (soft, hard))
    _checked("no new privileges", libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": directory, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # threads count toward RLIMIT_NPROC
        environment[variable] = "1"
    os.dup2(stdin, 0)
    os.dup2(nothing, 2)
    os.closerange(3, 4096)
    os.execve(sys.executable, [sys.executable, "-I", "-B", "main.py"], environment)


def wait_for(child: int, processes: int | None) -> int:
    """Wait for a child and reap orphans.

    Args:
        child: Process id.
        processes: Kill the child if /proc shows more processes than this, because RLIMIT_NPROC does not apply to root.
            None: no limit.

    Returns:
        The exit code, or 128 + the number of the signal that ended the child.
    """
    while True:
        if processes is None:
            pid, status = os.wait()
        else:
            signal.sigtimedwait({signal.SIGCHLD}, 0.02)
            if sum(name.isdigit() for name in os.listdir("/proc")) > processes + 2:
                return 128 + signal.SIGKILL
            pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def forked(action: Callable[[], int], processes: int | None = None) -> int:
    """Run `action` in a child that dies with this process, and return its exit code; see `wait_for`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        code = SETUP_FAILED
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
            code = action()
        except BaseException as error:
            os.write(2, _reason(error))
        finally:
            os._exit(code)
    return wait_for(child, processes)


def main() -> int:
    limits, job = json.loads(sys.argv[1]), json.load(sys.stdin)

    def program() -> int:
        run_program(job, limits)
        return SETUP_FAILED

    def first() -> int:  # process 1 of its namespace; all others die with it
        close_file_system(limits["scratch_bytes"])
        return forked(program, limits["processes"])

    libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if not limits["namespaces"]:
        return forked(program)
    try:
        enter_namespaces()
    except OSError as error:
        os.write(2, _reason(error))
        return SETUP_FAILED
    return forked(first)


if __name__ == "__main__":
    sys.exit(main())
