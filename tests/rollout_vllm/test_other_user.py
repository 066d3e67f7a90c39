"""Another user of the machine has no access to learner and sampler. Needs root: a fork becomes that user."""

import ctypes
import errno
import fcntl
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import fake_sampler
import pytest
import torch
from listening import listening
from test_engine_process import ORDER, ignore
from tiny_runs import settings

from qarl.config import Config
from qarl.rollout.vllm.process import SamplerProcess
from qarl.storage.rundir import RunDirectory
from qarl.weight_sync.fingerprints import fingerprints
from qarl.weight_sync.update import WeightUpdate

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")

NOBODY = 65534
PTRACE_ATTACH, PTRACE_DETACH, PIDFD_OPEN, PIDFD_GETFD = 16, 17, 434, 438
SECRET = b"published weights"
LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass
class Scene:
    """A run under way: its directory, and the processes of its learner, which is this one, and of its sampler."""

    folder: Path
    sampler: int
    memory: int  # descriptor of the memory file, in both
    counters: Path  # of CUDA IPC, as torch makes them
    listens: list[str]

    @property
    def pids(self) -> dict[str, int]:
        return {"learner": os.getpid(), "sampler": self.sampler}


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    """In a directory that everybody can look into, as a home often is; what qarl writes there has the usual umask."""
    patch = pytest.MonkeyPatch()
    fake_sampler.install(patch.setattr)
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    place.chmod(0o755)
    before = os.umask(0o022)
    folder = place / "run"
    data = settings(Path("models/tiny"), train={"steps": 10, "run_dir": str(folder)})
    counters = torch.zeros(3, dtype=torch.int64)
    _, name, _ = counters.untyped_storage()._share_filename_cpu_()
    with RunDirectory.open(Config.model_validate(data), "auto") as run:
        run.begin()
        (folder / "metrics.jsonl").write_text('{"step": 1}\n')
        (folder / "troubles").write_text("")
        sampler = SamplerProcess(torch.device("cpu"), None, "fast", folder / "sampler.log", 60)
        (transport,) = sampler.transports
        try:
            sampler.start(fake_sampler.settings(folder), {}, ignore)
            tensors = {"secret": torch.frombuffer(bytearray(SECRET), dtype=torch.uint8)}
            update = WeightUpdate(1, [transport.pack(tensors)], fingerprints(tensors.items()), [])
            sampler.call("publish", update, ignore)
            assert len(sampler.call("generate", ORDER, ignore)) == 8
            yield Scene(
                folder,
                sampler.pid,
                transport.fd,
                Path("/dev/shm", name.decode().lstrip("/")),
                listening(os.getpid()) + listening(sampler.pid),
            )
        finally:
            sampler.close()
            os.umask(before)
            patch.undo()
    shutil.rmtree(place)


def trace(pid: int) -> None:
    if LIBC.ptrace(PTRACE_ATTACH, pid, None, None) < 0:
        raise OSError(ctypes.get_errno(), "ptrace")
    os.waitpid(pid, 0x40000000)  # __WALL
    LIBC.ptrace(PTRACE_DETACH, pid, None, None)


def take_descriptor(pid: int, fd: int) -> bytes:
    process = LIBC.syscall(PIDFD_OPEN, pid, 0)
    taken = LIBC.syscall(PIDFD_GETFD, process, fd, 0)
    if taken < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return os.pread(taken, len(SECRET), 0)


def lock(path: Path, flags: int) -> None:
    with suppress(BlockingIOError):  # the run has it
        fcntl.flock(os.open(path, flags), fcntl.LOCK_SH | fcntl.LOCK_NB)


def attempts(scene: Scene) -> dict[str, Callable[[], object]]:
    """What another user might try, by name; what gets in raises nothing."""
    folder = scene.folder
    tries: dict[str, Callable[[], object]] = {
        "read the lock": lambda: lock(folder / ".lock", os.O_RDONLY),
        "write the lock": lambda: os.open(folder / ".lock", os.O_RDWR),
        "replace the lock": lambda: os.symlink("metrics.jsonl", folder / "planted"),
        "add a file": lambda: (folder / "config.yaml.tmp").write_text("x"),
        "change a result": lambda: (folder / "metrics.jsonl").open("a").close(),
        "remove a result": lambda: (folder / "environment.json").rename(folder / "gone"),
        "write the sampler's log": lambda: (folder / "sampler.log").open("a").close(),
        "read the counters of CUDA IPC": lambda: scene.counters.read_bytes(),
        "write the counters of CUDA IPC": lambda: scene.counters.open("r+b").close(),
    }
    for who, pid in scene.pids.items():
        tries |= {
            f"list descriptors of the {who}": lambda pid=pid: os.listdir(f"/proc/{pid}/fd"),
            f"open the memory file of the {who}": lambda pid=pid: Path(f"/proc/{pid}/fd/{scene.memory}").read_bytes(),
            f"map the memory file of the {who}": lambda pid=pid: os.open(f"/proc/{pid}/fd/{scene.memory}", os.O_RDWR),
            f"take the memory file of the {who}": lambda pid=pid: take_descriptor(pid, scene.memory),
            f"read the memory of the {who}": lambda pid=pid: os.open(f"/proc/{pid}/mem", os.O_RDONLY),
            f"read the environment of the {who}": lambda pid=pid: Path(f"/proc/{pid}/environ").read_bytes(),
            f"signal the {who}": lambda pid=pid: os.kill(pid, 0),
        }
    tries["trace the sampler"] = lambda: trace(scene.sampler)
    for name in scene.listens:
        tries[f"connect to {name}"] = lambda name=name: connect(name)
    return tries


def connect(name: str) -> None:
    """To a socket as `listening` names it."""
    kind, _, address = name.partition(" ")
    if kind == "unix":
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(address.replace("@", "\0", 1))
        return
    with socket.socket(socket.AF_INET6 if kind.endswith("6") else socket.AF_INET) as caller:
        caller.connect(("::1" if kind.endswith("6") else "127.0.0.1", int(address.rpartition(":")[2], 16)))


def tried_as(user: int, scene: Scene, tries: Callable[[Scene], dict[str, Callable[[], object]]]) -> dict[str, str]:
    """The attempts in a fork that is `user` and holds no descriptor of ours: `in`, or the error that kept it out."""
    chosen = tries(scene)  # here: in the fork, this process is another
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writing, 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        found = {"user": str(os.geteuid())}
        for name, attempt in chosen.items():
            try:
                attempt()
                found[name] = "in"
            except OSError as error:
                found[name] = errno.errorcode.get(error.errno, str(error))
            except BaseException as error:
                found[name] = repr(error)
        os.write(3, json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as report:
        found = json.loads(report.read())
    os.waitpid(pid, 0)
    assert found.pop("user") == str(user)
    return found


def test_another_user_has_no_access(scene: Scene) -> None:
    found = tried_as(NOBODY, scene, attempts)
    assert {name: outcome for name, outcome in found.items() if outcome not in ("EACCES", "EPERM")} == {}
    assert len(found) >= 24
    left = {entry.name for entry in scene.folder.iterdir()}
    assert {"environment.json", "metrics.jsonl", ".lock"} <= left and not {"planted", "gone", "config.yaml.tmp"} & left


def test_the_attempts_succeed_for_the_runs_own_user(scene: Scene) -> None:
    """As the run's own user; and the other user can see the directory, so that it is not merely out of reach."""
    harmful = ("replace", "add", "change", "remove", "trace")
    found = tried_as(
        0,
        scene,
        lambda scene: {name: attempt for name, attempt in attempts(scene).items() if not name.startswith(harmful)},
    )
    # A container may forbid even its root to look into processes; then these attempts say nothing there.
    kept_out = {name for name, outcome in found.items() if outcome != "in"}
    assert all(name.startswith(("take the memory", "read the memory")) for name in kept_out), found
    seen = tried_as(
        NOBODY,
        scene,
        lambda scene: {
            "list the directory": lambda: os.listdir(scene.folder),
            "read a result": lambda: (scene.folder / "metrics.jsonl").read_bytes(),
            "stat the lock": lambda: (scene.folder / ".lock").stat(),
        },
    )
    assert set(seen.values()) == {"in"}


def test_neither_process_listens(scene: Scene) -> None:
    assert scene.listens == []
