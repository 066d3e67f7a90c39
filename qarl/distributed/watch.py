"""Watch thread of a rank: sends heartbeats, monitors the other ranks, and ends the process if one of them fails.

A collective that waits for a dead rank cannot be interrupted from Python, and on a GPU not at all. So each rank posts a
heartbeat about once per second and reads the heartbeats of the others and the fault that ends the run.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from qarl.distributed.fault import OTHER_RANK, Fault, host
from qarl.distributed.key_value_store import KeyValueStore

TICK_S = 1.0  # seconds between heartbeats
GRACE_S = 10.0  # seconds for the main thread to end by itself once another rank has failed
SILENT = 5  # ticks without a heartbeat after which a rank is blamed for a broken connection
NOTE = "fault"


class Watch(threading.Thread):
    """Watch thread of one rank.

    Args:
        store: Key-value store shared by the ranks.
        rank, count: This rank and the number of ranks.
        timeout_s: Seconds without a heartbeat after which a rank's silence ends the run.
        record_fault: Called with the fault before this thread ends the process.

    Attributes:
        stuck: Returns at once whether a GPU collective has failed or has waited for timeout_s.
        begun: Returns the number of collectives that this rank has begun. It is sent with heartbeats, and shows which
            rank did not reach a collective.
        fault: The fault that ended the run, once known here.
    """

    def __init__(
        self, store: KeyValueStore, rank: int, count: int, timeout_s: float, record_fault: Callable[[Fault], None]
    ) -> None:
        super().__init__(name="ranks", daemon=True)
        self.fault: Fault | None = None
        self.begun: Callable[[], int] = lambda: 0
        self.stuck: Callable[[], bool] = lambda: False
        self._store, self._rank, self._count, self._timeout_s = store, rank, count, timeout_s
        self._record_fault = record_fault
        self._tick_s = min(TICK_S, timeout_s / 20)
        self._ended, self._turn = threading.Event(), threading.Lock()
        self._hosts = [""] * count
        self._signs: list[tuple[str | None, float]] = [(None, time.monotonic())] * count
        self._store.post(f"host-{rank}", host())
        self._store.post(f"sign-{rank}", "0 0")

    def run(self) -> None:
        beat, leave_at = 0, None
        while not self._ended.wait(self._tick_s):
            beat += 1
            try:
                with self._turn:
                    self._exchange_heartbeats(beat)
            except (OSError, RuntimeError) as error:  # the directory, or the store's process, is gone
                self.fault = self.fault or self._of(0, f"the ranks' key-value store is gone ({type(error).__name__})")
            if self.fault is not None and leave_at is None:
                own = self.fault.rank == self._rank
                leaving = own and self.fault.code is not None  # this rank reported its fault and is ending by itself
                leave_at = time.monotonic() + (self._timeout_s if leaving else min(GRACE_S, self._timeout_s))
                if own and not leaving:
                    _print_stack(self.fault)
            if leave_at is not None and time.monotonic() > leave_at and not self._ended.is_set():
                assert self.fault is not None
                self._record_fault(self.fault)
                os._exit(OTHER_RANK)

    def stop(self) -> None:
        """Stop sending heartbeats, and never end the process from this thread."""
        self._ended.set()
        if threading.current_thread() is not self:
            self.join(self._timeout_s)

    def claim(self, fault: Fault) -> Fault:
        """Report a fault to all ranks; returns the first fault that was reported."""
        with self._turn, suppress(OSError, RuntimeError):
            fault = Fault.of(self._store.claim(NOTE, fault.text()))
        self.fault = fault
        return fault

    def find(self, error: BaseException) -> Fault:
        """Find the fault behind a failed collective. Waits for a report or for a missing heartbeat."""
        end = time.monotonic() + (SILENT + 3) * self._tick_s
        while self.fault is None and time.monotonic() < end:
            if silent := self._silent(SILENT * self._tick_s):
                return self.claim(self._quiet(silent[0]))
            time.sleep(self._tick_s / 5)
        if self.fault is not None:
            return self.fault
        if (late := self._late()) is not None:
            return self.claim(self.absent(late))
        reason = " ".join(str(error).split())[:300]
        return self.claim(self._of(self._rank, f"lost its connection to another rank: {reason}"))

    def _exchange_heartbeats(self, beat: int) -> None:
        """Post a heartbeat, and read the others' heartbeats and the fault."""
        try:
            self._store.post(f"sign-{self._rank}", f"{beat} {self.begun()}")
        except OSError as error:  # a full disk may have space again before the others miss the heartbeat
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        if self.fault is None and (note := self._store.read(NOTE)) is not None:
            self.fault = Fault.of(note)
        now = time.monotonic()
        for rank in range(self._count):
            sign = self._store.read(f"sign-{rank}")
            if sign != self._signs[rank][0]:
                self._signs[rank] = (sign, now)
                self._hosts[rank] = self._hosts[rank] or self._store.read(f"host-{rank}") or ""
        if self.fault is not None:
            return
        if silent := self._silent(self._timeout_s):
            self._post(self._quiet(silent[0]))
        elif self.stuck():
            late = self._late()
            line = f"a collective of the GPUs failed, or waited for {self._timeout_s:g} s (distributed.timeout_s)"
            self._post(self._of(self._rank, line) if late is None else self.absent(late))

    def _post(self, fault: Fault) -> None:
        self.fault = Fault.of(self._store.claim(NOTE, fault.text()))

    def _silent(self, seconds: float) -> list[int]:
        """Return the ranks without a heartbeat for `seconds`. A rank that never sent one has not started yet."""
        now = time.monotonic()
        return [r for r, (sign, since) in enumerate(self._signs) if sign is not None and now - since > seconds]

    def _late(self) -> int | None:
        """Return the rank that has begun the fewest collectives, if it is behind this one."""
        begun = [int(sign.split()[1]) if sign else 0 for sign, _ in self._signs]
        begun[self._rank] = self.begun()
        fewest = min(begun)
        return begun.index(fewest) if fewest < begun[self._rank] else None

    def _quiet(self, rank: int) -> Fault:
        seconds = time.monotonic() - self._signs[rank][1]
        return self._of(rank, f"gave no sign of life for {seconds:.0f} s")

    def absent(self, rank: int, longer_s: float = 0) -> Fault:
        """Return the fault of a rank that did not reach a collective within `timeout_s + longer_s` seconds."""
        and_more = f" and {longer_s:g} more" if longer_s else ""
        waited = f"{self._timeout_s:g} s (distributed.timeout_s){and_more}"
        return self._of(rank, f"did not reach a collective; the others waited {waited}")

    def _of(self, rank: int, line: str) -> Fault:
        return Fault(rank, self._hosts[rank] or host(), None, line)


def _print_stack(fault: Fault) -> None:
    """Print the main thread's stack of this hung rank to its log, innermost call last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
    print(f"{stack}rank {fault.rank} {fault.line}; its stack is above", file=sys.stderr, flush=True)
