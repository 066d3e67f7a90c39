"""When a vLLM on the learner's GPU sleeps and wakes."""

from __future__ import annotations

import time

import torch

from qarl.rollout.engine import ignore_progress
from qarl.rollout.headroom import Headroom
from qarl.rollout.vllm.inline import InlineSampler
from qarl.rollout.vllm.process import Sampler

MARGIN = 2**30  # bytes of GPU memory that no estimate counts, for waking beside the learner


class SamplerSleep:
    """The sleep state of one sampler at a time. Methods raise the sampler's SamplerFault.

    Args:
        headroom: Free memory of the learners' GPUs.
        beside: Bytes of an optimizer update, beside which vLLM may wake already; None: it wakes for the next publish.

    Attributes:
        asleep: True until it has woken, also after it was told to wake.
        metrics: Of the last sleep and wake-up, by name.
    """

    def __init__(self, headroom: Headroom, beside: int | None) -> None:
        self._headroom, self._beside = headroom, beside
        self.asleep = self._waking = False
        self.metrics: dict[str, float] = {}
        self._freed = 0  # bytes, by the last sleep

    def forget(self) -> None:
        """Forget a sampler that has ended."""
        self.asleep = self._waking = False

    def fall(self, sampler: Sampler, level: int) -> bool:
        """Put it to sleep and wait. Returns False if it keeps everything or sleeps already."""
        if self.asleep and not self._waking:
            return False
        self.wake(sampler)
        begin = time.perf_counter()
        freed = sampler.call("sleep", level, ignore_progress)
        if freed is None:
            return False
        self.asleep, self._freed = True, freed
        self.metrics["time/sampler_sleep_s"] = time.perf_counter() - begin
        self.metrics["memory/sampler_freed_gib"] = freed / 2**30
        return True

    def begin_to_wake(self, sampler: Sampler | None) -> None:
        """Start waking it without waiting, if its GPUs have memory for it and for an update. May be called again.

        Does nothing for a sampler in this process. All ranks that share the memory ask at the same time.
        """
        waits = self.asleep and not self._waking and not isinstance(sampler, InlineSampler)
        needed = self._freed + self._beside + MARGIN if waits and self._beside is not None else None
        if self._headroom(needed) and sampler is not None:
            sampler.begin("wake", None)
            self._waking = True

    def wake(self, sampler: Sampler) -> None:
        """Wait until it is awake."""
        if not self.asleep:
            return
        if not self._waking:
            torch.cuda.empty_cache()  # the sampler needs the memory that the learner cached
        begin = time.perf_counter()
        if not self._waking:
            sampler.begin("wake", None)
        self._waking = False
        sampler.finish(ignore_progress)
        self.metrics["time/sampler_wake_s"] = time.perf_counter() - begin
        self.asleep = False
