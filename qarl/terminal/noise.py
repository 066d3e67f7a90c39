"""Suppress library output that would disturb the run's display."""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
import transformers

from qarl.rewards.log import RewardLog, RewardLogHandler


@contextmanager
def quiet_libraries(say: Callable[[str], None]) -> Iterator[None]:
    """Suppress progress bars, log messages and Python warnings of libraries. `python -W` keeps the warnings.

    The settings of transformers and the hub client remain after the context ends.

    Args:
        say: Called with one line per operation that has no deterministic implementation in torch, and per thread that
            ends with an exception, such as a tracker's thread on a full disk.
    """
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"  # read when `datasets` is imported, which few runs do
    huggingface_hub.utils.disable_progress_bars()
    huggingface_hub.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    hook = threading.excepthook
    threading.excepthook = lambda fault: say(_in_thread(fault))
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
            warnings.filterwarnings("once", message=".*does not have a deterministic implementation")
            warnings.showwarning = lambda message, *place, **_: say(str(message).split(", but you set")[0])
        try:
            yield
        finally:
            threading.excepthook = hook


def _in_thread(fault: threading.ExceptHookArgs) -> str:
    """Describe a thread's uncaught exception in one line."""
    name = fault.thread.name if fault.thread is not None else "a thread"
    return " ".join(f"{name} ended: {fault.exc_type.__name__}: {fault.exc_value}".split())


@contextmanager
def rewards_logged(path: Path) -> Iterator[None]:
    """Context manager: write failures that the reward pool logs to the `RewardLog` at `path`."""
    logger = logging.getLogger("qarl.rewards")
    RewardLog(path).write(b"")  # creates the file even if nothing fails
    handler = RewardLogHandler(path)
    before = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(handler)
