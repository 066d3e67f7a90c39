"""vLLM in the learner's process: publishes need no copy between processes, but a crash of vLLM ends the run."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from qarl.errors import UserError
from qarl.rollout.engine import Progress
from qarl.rollout.vllm.channel import root_cause
from qarl.rollout.vllm.host import Host
from qarl.rollout.vllm.process import Sampler
from qarl.rollout.vllm.settings import SamplerSettings
from qarl.storage.disk import disk_errors
from qarl.weight_sync.fingerprints import Fingerprint
from qarl.weight_sync.sender import SamplerFault


class InlineSampler(Sampler):
    """A vLLM in this process. log: File for vLLM's log."""

    transports = ()

    def __init__(self, log: Path) -> None:
        self.log = log
        self._order: tuple[str, Any] | None = None

    def start(self, settings: SamplerSettings, expected: Mapping[str, Fingerprint], tick: Progress) -> None:
        tick(0, 0)
        self._log_to_file()
        with self._faults(), _plain_algorithms():
            self._host = Host(settings, expected)
        self.capabilities = self._host.capabilities()

    def begin(self, operation: str, payload: Any) -> None:
        """Store an order. `finish` executes it."""
        self._order = (operation, payload)

    def finish(self, tick: Progress) -> Any:
        assert self._order is not None
        (operation, payload), self._order = self._order, None
        with self._faults(), _plain_algorithms():
            return self._host.execute(operation, payload, iter, tick)

    def close(self) -> None:
        if hasattr(self, "_host"):
            self._host.close()
            del self._host

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Convert vLLM's exceptions to SamplerFault and write their traceback to the log; UserErrors pass through."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # whatever vLLM raises
            with suppress(OSError), self.log.open("a") as log:  # a full disk
                traceback.print_exception(error, file=log)
            raise SamplerFault(root_cause(error)) from error

    def _log_to_file(self) -> None:
        """Write vLLM's log messages to the file. Must be called before vLLM is imported."""
        os.environ |= {"VLLM_CONFIGURE_LOGGING": "0", "TQDM_DISABLE": "1"}
        logger = logging.getLogger("vllm")
        with disk_errors(self.log):
            handler = logging.FileHandler(self.log, encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"))
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(logging.INFO)


@contextmanager
def _plain_algorithms() -> Iterator[None]:
    """Context manager: torch's deterministic algorithms are off, as in a separate process.

    With deterministic algorithms torch's compiler cannot benchmark kernels, and vLLM does not start.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
