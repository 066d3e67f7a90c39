"""The sleep of a vLLM on the learner's GPU, as the learner sees it: when it falls asleep, and when it is woken."""

from __future__ import annotations

import time

import torch

from qarl.rollout.engine import ignore_progress
from qarl.rollout.vllm.asleep import has_room
from qarl.rollout.vllm.inline import InlineSampler
from qarl.rollout.vllm.process import SamplerProcess
from qarl.rollout.vllm.team import SamplerTeam

Sampler = SamplerProcess | SamplerTeam | InlineSampler

MARGIN = 2**30  # bytes of a GPU for what no estimate counts, where vLLM wakes beside the learner


class SamplerSleep:
    """Of one sampler at a time. What it raises is the sampler's, SamplerFault.

    device: the learner's. beside: bytes of it that an update of the learner takes, beside which vLLM may wake already;
    None: it wakes for the next publish. asleep: until it has woken, whether it is told to or not. metrics: of the last
    sleep and waking, by name.
    """

    def __init__(self, device: torch.device, beside: int | None) -> None:
        self._device, self._beside = device, beside
        self.asleep = self._waking = False
        self.metrics: dict[str, float] = {}
        self._freed = 0  # bytes, by the last sleep

    def forget(self) -> None:
        """The sampler is gone."""
        self.asleep = self._waking = False

    def fall(self, sampler: Sampler, level: int) -> bool:
        """Let it sleep, and wait. Returns whether it did: not one that keeps everything, or is asleep already."""
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

    def begin_to_wake(self, sampler: Sampler) -> None:
        """Wake it without waiting, where the GPU has room for it and an update. It may be called again."""
        if self._beside is None or not self.asleep or self._waking:
            return
        if not isinstance(sampler, SamplerProcess):  # inline, or on GPUs whose room is other ranks'
            return
        if not has_room(self._device, self._freed + self._beside + MARGIN):
            return
        sampler.begin("wake", None)
        self._waking = True

    def wake(self, sampler: Sampler) -> None:
        """Wait until it is awake."""
        if not self.asleep:
            return
        if not self._waking:
            torch.cuda.empty_cache()  # the learner's spare memory is what the sampler gave it
        begin = time.perf_counter()
        if not self._waking:
            sampler.begin("wake", None)
        self._waking = False
        sampler.finish(ignore_progress)
        self.metrics["time/sampler_wake_s"] = time.perf_counter() - begin
        self.asleep = False
