"""Keeps what libraries print out of the run's own display."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
import transformers


@contextmanager
def quiet_libraries(say: Callable[[str], None]) -> Iterator[None]:
    """While entered, no progress bars, notices and Python warnings of libraries; warnings stay with `python -W`.

    say: gets one line for each operation that torch cannot run reproducibly. transformers and the hub client keep quiet
    afterwards too.
    """
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"  # read when `datasets` is imported, which is seldom needed
    huggingface_hub.utils.disable_progress_bars()
    huggingface_hub.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
            warnings.filterwarnings("once", message=".*does not have a deterministic implementation")
            warnings.showwarning = lambda message, *place, **_: say(str(message).split(", but you set")[0])
        yield


@contextmanager
def rewards_logged(path: Path) -> Iterator[None]:
    """While entered, every failure that the reward pool logs goes to the end of the file `path`, and nowhere else."""
    logger = logging.getLogger("qarl.rewards")
    handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    before = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(handler)
        handler.close()
