"""Which signals stop a process safely, and which exceptions a signal raises."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from qarl.distributed.fault import INTERRUPTED
from qarl.training.interrupt import InterruptGuard
from qarl.utils.signals import Interrupted, Signals, StoppedAtOnce, is_stop, stop_signals

STOPS = [signal.SIGHUP, signal.SIGINT, signal.SIGTERM]


@contextmanager
def hangup_is(handler: signal.Handlers) -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("signum", STOPS)
def test_each_stop_signal_is_noted_by_a_run_and_passed_on_by_a_launcher(signum):
    said: list[str] = []
    with hangup_is(signal.SIG_DFL):
        with InterruptGuard(said.append) as guard, pytest.raises(Interrupted):
            signal.raise_signal(signum)
        with InterruptGuard(said.append) as guard:
            guard.defer()
            signal.raise_signal(signum)
            with pytest.raises(Interrupted) as stopped:
                guard.check()
            with pytest.raises(StoppedAtOnce):
                signal.raise_signal(signal.SIGINT)
        with Signals() as signals:
            signal.raise_signal(signum)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    assert stopped.value.exit_code == 128 + signum and stopped.value.exit_code in INTERRUPTED
    assert signals.received == [signum]
    assert len(said) == 1 and said[0].startswith(signal.Signals(signum).name)


def test_under_nohup_a_hangup_stays_ignored_and_only_signals_stop():
    said: list[str] = []
    with hangup_is(signal.SIG_IGN):
        assert signal.SIGHUP not in stop_signals()
        with InterruptGuard(said.append), Signals() as signals:
            signal.raise_signal(signal.SIGHUP)
    assert signals.received == [] and said == []
    assert all(is_stop(error) for error in (Interrupted(15), StoppedAtOnce(), KeyboardInterrupt()))
    assert not any(is_stop(error) for error in (SystemExit(0), GeneratorExit(), MemoryError(), BaseException()))
