"""The sleep of a vLLM on the learner's GPU, as the learner sees it: when it falls asleep, and when it is woken."""

from __future__ import annotations

import time

import torch

from qarl.rollout.engine import ignore_progress
from qarl.rollout.room import Room
from qarl.rollout.vllm.inline import InlineSampler
from qarl.rollout.vllm.process import SamplerProcess
from qarl.rollout.vllm.team import SamplerTeam

Sampler = SamplerProcess | SamplerTeam | InlineSampler

MARGIN = 2**30  # bytes of a GPU for what no estimate counts, where vLLM wakes beside the learner


class SamplerSleep:
    """Of one sampler at a time. What it raises is the sampler's, SamplerFault.

    room: of the learners' GPUs. beside: bytes of one that an update of the learner takes, beside which vLLM may wake
    already; None: it wakes for the next publish. asleep: until it has woken, whether it is told to or not. metrics: of
    the last sleep and waking, by name.
    """

    def __init__(self, room: Room, beside: int | None) -> None:
        self._room, self._beside = room, beside
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

    def begin_to_wake(self, sampler: Sampler | None) -> None:
        """Wake it without waiting, where its GPUs have room for it and an update. It may be called again.

        Not one that is in this process. Other ranks that have a part in the room ask at the same time.
        """
        waits = self.asleep and not self._waking and not isinstance(sampler, InlineSampler)
        needed = self._freed + self._beside + MARGIN if waits and self._beside is not None else None
        if self._room(needed) and sampler is not None:
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
