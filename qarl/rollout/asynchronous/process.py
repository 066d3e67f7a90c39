"""The learner's handle of an asynchronous sampler's process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from qarl.config import Config
from qarl.rollout.vllm.launch import LOG
from qarl.rollout.vllm.process import TICK_S, SamplerProcess
from qarl.rollout.vllm.settings import AsyncSettings, SamplerSettings
from qarl.weight_sync.fingerprints import Fingerprint

START_S = 300.0  # seconds for imports and building the model


class AsyncProcess(SamplerProcess):
    """A sampler's process that generates while the learner learns, and sends heartbeats.

    It imports its modules and then waits for orders of a `SamplerConnection`.

    Args:
        config: The run's configuration.
        learner: The learner's device.
        gpu: CUDA index of the sampler's GPU; None on the CPU.
        directory: Directory of the log.

    Raises:
        UserError: The log cannot be written.
    """

    timeout_key = "rollout.async.timeout_s"

    def __init__(self, config: Config, learner: torch.device, gpu: int | None, directory: Path) -> None:
        rollout = config.rollout
        assert rollout.asynchronous is not None, "the run samples asynchronously"
        self._vllm, self.gpu = rollout.engine == "vllm", gpu
        numerics = "native" if not self._vllm else "exact" if rollout.exact else "fast"
        super().__init__(learner, gpu, numerics, directory / LOG, rollout.asynchronous.timeout_s)

    def begin_with(self, settings: AsyncSettings) -> None:
        """Send the settings. The native engine then builds its model; vLLM has loaded its model after `begin_start`."""
        if self._vllm:
            self.begin("sample", settings)
        else:
            self.begin("start", (settings, self._plan))
        self._expect_ready()

    def begin_start(self, settings: SamplerSettings, expected: Mapping[str, Fingerprint]) -> None:
        super().begin_start(settings, expected)
        self._expect_ready()

    def _expect_ready(self) -> None:
        self.expect_answer()
        self._deadline = max(self._deadline, time.monotonic() + START_S)  # no heartbeats meanwhile

    def wait_until_ready(self, tick: Callable[[], None]) -> None:
        """Wait until the model is built, calling `tick` repeatedly. Raises SamplerFault."""
        while not self.poll(TICK_S):
            tick()
