"""vLLM's sleep beside other processes, whose memory must neither fail it nor be counted."""

import importlib.util
from pathlib import Path

import pytest
import torch
from needs_vllm import needs_vllm

from qarl.rollout.shared import has_headroom
from qarl.rollout.vllm.engine import PROFILING_ERROR
from qarl.rollout.vllm.host import GREW, tolerate_memory_growth


class Worker:
    """Sleeps, and raises the given errors, in order."""

    def __init__(self, *ends: Exception | None) -> None:
        self.ends, self.levels = list(ends), []

    def sleep(self, level: int) -> None:
        self.levels.append(level)
        end = self.ends.pop(0)
        if end is not None:
            raise end


def test_memory_that_other_processes_took_fails_no_sleep() -> None:
    worker = Worker(AssertionError(f"{GREW}."), None)
    with tolerate_memory_growth(worker):
        worker.sleep(level=1)
        worker.sleep(level=2)
    assert worker.levels == [1, 2]


@pytest.mark.parametrize("error", [AssertionError("the allocator is not there"), RuntimeError(GREW)])
def test_other_errors_of_a_sleep_are_raised(error: Exception) -> None:
    worker = Worker(error, AssertionError(GREW))
    with pytest.raises(type(error)), tolerate_memory_growth(worker):
        worker.sleep(level=1)
    with pytest.raises(AssertionError, match=GREW):  # the worker is as it was
        worker.sleep(level=1)


@needs_vllm
def test_vllm_still_has_the_messages_that_qarl_looks_for() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    worker = (Path(spec.origin).parent / "v1/worker/gpu_worker.py").read_text()
    assert worker.count(GREW) == 1 and worker.count(PROFILING_ERROR) == 1


@pytest.mark.parametrize(("needed", "room", "emptied"), [(1300, True, 1), (1301, False, 1), (1401, False, 0)], ids=str)
def test_torchs_cache_is_emptied_only_if_that_may_give_enough_headroom(monkeypatch, needed, room, emptied) -> None:
    """100 of 500 cached bytes stay, in blocks that are partly in use."""
    free, times = {"bytes": 900}, []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free["bytes"], 10_000))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: times.append(free.update(bytes=1300)))
    assert has_headroom(torch.device("cuda"), needed) == room and len(times) == emptied
