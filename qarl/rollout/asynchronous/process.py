"""The learner's handle of the sampler's process, and what is sent to it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from qarl.rollout.engine import SamplingParams
from qarl.rollout.vllm.channel import register
from qarl.rollout.vllm.process import TICK_S, SamplerProcess
from qarl.rollout.vllm.settings import SamplerSettings
from qarl.weight_sync.fingerprints import Fingerprint

START_S = 300.0  # for imports and the model
Partial = tuple[list[int], list[float], list[int]]  # tokens, log-probs and versions so far


@dataclass(frozen=True)
class AsyncSettings:
    """How the sampler's process is started.

    Attributes:
        config: The run's configuration as YAML.
        device: The sampler's device in its own numbering.
        max_length: Most tokens of prompt and response.
        longest: Tokens of the longest prompt of the data with a response of full length.
        sequences: Most responses in progress at a time.
        sampling: Of all responses. The seed is that of each group.
        threads: Of torch on a CPU; None on a GPU.
    """

    config: str
    device: str
    max_length: int
    longest: int
    sequences: int
    sampling: SamplingParams
    threads: int | None


@dataclass(frozen=True)
class Group:
    """Responses to sample for one prompt. partial: responses that have tokens already, by sample number."""

    number: int
    prompt_id: int
    token_ids: list[int]
    seed: int
    samples: list[int]
    partial: dict[int, Partial] = field(default_factory=dict)


register(AsyncSettings, Group)


class AsyncProcess(SamplerProcess):
    """A sampler's process that generates while the learner learns. It sends signs of life all the time.

    Args:
        learner: The learner's device.
        gpu: CUDA index of the sampler's GPU; None on the CPU.
        numerics: See `SamplerSettings`.
        vllm: Whether vLLM samples, in the process that it also has in a synchronous run. Otherwise the native engine.
    """

    timeout_key = "rollout.async.timeout_s"

    def __init__(
        self, learner: torch.device, gpu: int | None, numerics: str, log: Path, timeout_s: float, vllm: bool
    ) -> None:
        self._vllm, self.gpu = vllm, gpu
        super().__init__(learner, gpu, numerics if vllm else "native", log, timeout_s)

    def begin_with(self, settings: AsyncSettings) -> None:
        """Send the settings. The process then imports and builds the model, unless vLLM has."""
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
        self._deadline = max(self._deadline, time.monotonic() + START_S)  # it imports and builds without a sign of life

    def wait_until_ready(self, look: Any) -> None:
        """Wait until the model is built, calling `look()`. Raises SamplerFault."""
        while not self.poll(TICK_S):
            look()
