"""`qarl train --nproc`: starts one process per rank on this machine and reports how they ended.

Imports no torch. The ranks use a private directory for rendezvous and listen only on the loopback interface. Each rank
leads its own session, so a terminal's Ctrl-C reaches only the launcher, which forwards it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from qarl.checks.check import check_run
from qarl.cli.private_directory import rendezvous_directory
from qarl.config import Config, load_config
from qarl.distributed.exit_records import is_done, read_exit_record
from qarl.distributed.fault import INTERRUPTED, OTHER_RANK, Fault, forget_fault, host, write_fault
from qarl.distributed.key_value_store import DirectoryStore
from qarl.distributed.rank_info import RANKS_VARIABLE, log_name
from qarl.distributed.watch import GRACE_S, NOTE, TICK_S
from qarl.errors import UNEXPECTED, UserError
from qarl.inputs.paths import user_path
from qarl.memory.host import expected_device
from qarl.utils.machine import visible_gpus
from qarl.utils.signals import Signals, signal_name

POLL_S = 0.1
LEAVE_S = GRACE_S + 10  # seconds for the other ranks to end, once one has failed
TELL_S = 2 * TICK_S  # seconds in which a hung rank prints its stack before it is killed
STOP_S = 5.0  # seconds for the ranks to end after a second Ctrl-C
EARLY = 1  # reported in place of exit code 0 for a rank that ended before the run was complete
TAIL_LINES = 12
TAIL_BYTES = 16_384

_BOOT = (
    "import json, signal, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from qarl.utils.signals import signal_at_end_of; signal_at_end_of(int(sys.argv[2]), signal.SIGTERM); "
    "sys.argv[:] = ['qarl', *sys.argv[3:]]; from qarl.cli import main; main()"
)


def train_on_ranks(config: str, overrides: list[str], count: int) -> int:
    """Run `qarl train` on `count` ranks of this machine.

    Args:
        config: Path of the configuration file.
        overrides: `KEY=VALUE` arguments of the command line.
        count: Number of ranks.

    Returns:
        The exit code, see `launch`.

    Raises:
        UserError: The configuration, its inputs or the number of ranks are invalid. No process was started.
    """
    if not user_path(config, "CONFIG").is_file():
        raise UserError(f"CONFIG: {config} is not a file; --nproc starts several processes that read it")
    loaded = load_config(config, overrides)
    check_run(loaded, count, gpus_for_ranks(loaded), config, overrides)
    return launch(["train", "--nproc", str(count), config, *overrides], count, loaded.run_dir)


def gpus_for_ranks(config: Config) -> int | None:
    """Return the number of GPUs that the ranks can use; None on the CPU."""
    return (len(visible_gpus()) or None) if expected_device(config) == "cuda" else None


def launch(argv: list[str], count: int, run_dir: Path) -> int:
    """Run the `qarl` command line `argv` in `count` ranks.

    Prints one message on stderr that says which rank failed, after the last lines of its output.

    Args:
        argv: Arguments of `qarl`.
        count: Number of ranks.
        run_dir: Run directory.

    Returns:
        The exit code of the first rank to fail with a code other than 75 (another rank failed), or 0.
    """
    with rendezvous_directory() as (directory, inherited), Signals() as signals:
        launched = Launched(argv, count, directory, run_dir, inherited)
        try:
            launched.wait(signals)
        finally:
            launched.kill()
        return launched.conclude()


class Launched:
    """The ranks' processes.

    Attributes:
        codes: Rank to exit code as a shell reports it, in the order in which the ranks ended. Ranks ended by `kill` are
            left out.
        faults: Faults of the ranks that failed by themselves.
        inherited: File descriptors that the ranks keep open.
    """

    def __init__(
        self, argv: list[str], count: int, directory: Path, run_dir: Path, inherited: tuple[int, ...] = ()
    ) -> None:
        self.codes: dict[int, int] = {}
        self.faults: dict[int, Fault] = {}
        self._inherited = inherited
        self._directory, self._run_dir, self._stopped = directory, run_dir, False
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._count = count
        cores = len(os.sched_getaffinity(0))
        try:
            for rank in range(count):
                own = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count}
                environment = {
                    "OMP_NUM_THREADS": str(max(1, cores // count)),
                    **os.environ,
                    RANKS_VARIABLE: str(directory),
                }
                environment |= {name: str(value) for name, value in own.items()}
                self._running[rank] = self._start(rank, argv, environment)
        except BaseException:
            self.kill()
            raise

    def _start(self, rank: int, argv: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(os.getpid()), *argv]
        how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True, "env": environment}
        how["pass_fds"] = self._inherited
        if rank == 0:
            return subprocess.Popen(command, **how)
        with (self._directory / log_name(rank)).open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, **how)

    def wait(self, signals: Signals) -> None:
        """Wait until all ranks have ended, or until the grace period after a failure is over. Forwards signals.

        The first signal asks for a safe stop. A later Ctrl-C kills ranks that do not end within STOP_S seconds.
        """
        forwarded, end, failed_at = 0, float("inf"), float("inf")
        while self._running and time.monotonic() < end:
            for rank, process in list(self._running.items()):
                if (code := process.poll()) is not None:
                    del self._running[rank]
                    self._ended(rank, code)
            if any(code not in (0, *INTERRUPTED) for code in self.codes.values()):
                failed_at = min(failed_at, time.monotonic())
                end = min(end, failed_at + LEAVE_S)
                if time.monotonic() > failed_at + TELL_S:
                    self._kill_hung()
            for signum in signals.received[forwarded:]:
                forwarded += 1
                if forwarded > 1 and signum == signal.SIGINT:
                    self._stopped, end = True, min(end, time.monotonic() + STOP_S)
                for process in self._running.values():
                    process.send_signal(signum)
            if self._running:
                time.sleep(POLL_S)

    def kill(self) -> None:
        """Kill the ranks that still run, with their child processes."""
        for rank in list(self._running):
            self._kill(rank)

    def _kill(self, rank: int) -> None:
        process = self._running.pop(rank)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _kill_hung(self) -> None:
        """Kill the rank that the others have timed out waiting for."""
        with suppress(OSError):
            text = DirectoryStore(self._directory).read(NOTE)
            if text is not None and (fault := Fault.of(text)).code is None and fault.rank in self._running:
                self._kill(fault.rank)

    def _ended(self, rank: int, code: int) -> None:
        """Record the exit code of a rank. If it failed, post its fault, because a killed rank cannot do so itself."""
        self.codes[rank] = code if code >= 0 else 128 - code
        if code == 0 and not is_done(self._directory, rank):
            self.codes[rank] = EARLY
            fault = self.faults[rank] = Fault(rank, host(), EARLY, "ended with exit code 0 before the end of the run")
        elif code < 0 or code not in (0, OTHER_RANK, *INTERRUPTED):
            fault = self.faults[rank] = self._fault(rank, code)
        else:
            return
        with suppress(OSError):
            DirectoryStore(self._directory).claim(NOTE, fault.text())

    def _fault(self, rank: int, code: int) -> Fault:
        """Return the fault of a rank that ended with `code`: its exit record, unless a signal killed it."""
        if code >= 0:
            with suppress(OSError, ValueError, TypeError):
                if (record := read_exit_record(self._directory, rank)) is not None:
                    return record
            return Fault(rank, host(), code, f"ended with exit code {code}")
        hint = ", perhaps for lack of memory" if code == -signal.SIGKILL else ""
        return Fault(rank, host(), 128 - code, f"was ended by {signal_name(-code)}{hint}")

    def conclude(self) -> int:
        """Print the final message; returns the exit code of the launcher."""
        failed = {rank: code for rank, code in self.codes.items() if code not in (0, OTHER_RANK)}
        if self._stopped:
            return 128 + signal.SIGINT
        if not failed and OTHER_RANK not in self.codes.values():
            return 0
        fault = self._first_fault(next(iter(failed), None))
        code = next(iter(failed.values()), fault.code or OTHER_RANK)
        if code in INTERRUPTED:
            return code
        if fault is self.faults.get(fault.rank):
            forget_fault(self._run_dir)  # another rank may have recorded that it timed out waiting for this one
        write_fault(self._run_dir, fault)
        if fault.rank > 0 and fault.code != 2:
            self._show_tail(fault.rank)
        records = [read_exit_record(self._directory, rank) for rank in range(self._count)]
        alike = self._count > 1 and all(record is not None and record.line == fault.line for record in records)
        for line in fault.line.split("\n"):
            print(f"error: {line}" if alike else f"error: rank {fault.rank}: {line}", file=sys.stderr)
        return code

    def _first_fault(self, rank: int | None) -> Fault:
        """Return the fault that ended the run. rank: the first rank that failed by itself."""
        store = DirectoryStore(self._directory)
        text = store.read(NOTE)
        posted = None if text is None else Fault.of(text)
        if rank is None or (posted is not None and posted.rank != rank):
            return posted or Fault(0, host(), OTHER_RANK, "ended, and no rank reported a reason")
        if rank in self.faults and (posted is None or posted.code is None):  # the others noticed before the launcher
            return self.faults[rank]
        if posted is None:
            return self._fault(rank, self.codes[rank])
        record = read_exit_record(self._directory, rank)  # also names the traceback file
        return record if record is not None and record.code in (2, UNEXPECTED) else posted

    def _show_tail(self, rank: int) -> None:
        """Print the last lines of a rank's output and the path of its log."""
        log_of_run = self._run_dir / log_name(rank)
        for log in (log_of_run, self._directory / log_name(rank)):
            with suppress(OSError), log.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
                lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
                if lines:
                    where = f" (full log: {log})" if log == log_of_run else ""
                    print(f"last output of rank {rank}{where}:", file=sys.stderr)
                    for line in lines[-TAIL_LINES:]:
                        print(f"    {line}", file=sys.stderr)
                    return
