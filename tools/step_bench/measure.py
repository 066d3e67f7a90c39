"""Seconds of a call, on the device and until the host has launched it; a GPU's memory, and less of it."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from qarl.training.metrics import peak_memory_gib
from qarl.training.profile_page import host_shares, on_device

Record = dict[str, Any]


def timed(
    call: Callable[[], object],
    device: torch.device,
    warmup: int,
    iterations: int,
    prepare: Callable[[], object] | None = None,
) -> Record:
    """Medians over `iterations`, after `warmup` calls that compile and allocate. prepare: before each, not timed.

    seconds: on a GPU between events around the call, which waits for nothing before it; on a CPU wall time.
    host_seconds: until the call came back, with nothing waited for that it does not wait for itself.
    peak_gib: most memory in use in these calls, of the GPU as torch allocates it, or resident of the process.
    """
    seconds, host = [], []
    for turn in range(warmup + iterations):
        if prepare is not None:
            prepare()
        if turn == warmup and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        took, launched = _once(call, device)
        if turn >= warmup:
            seconds.append(took)
            host.append(launched)
    return {
        "seconds": statistics.median(seconds),
        "all_seconds": seconds,
        "host_seconds": statistics.median(host),
        "peak_gib": peak_memory_gib(device),
    }


def _once(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    if device.type != "cuda":
        begin = time.perf_counter()
        call()
        took = time.perf_counter() - begin
        return took, took
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    start.record()
    call()
    end.record()
    launched = time.perf_counter() - begin
    torch.cuda.synchronize(device)
    return 1e-3 * start.elapsed_time(end), launched


def top_kernels(call: Callable[[], object], device: torch.device, count: int) -> list[Record]:
    """The kernels of one call with the most device time, or without a device the operations with the most of their own:
    name, milliseconds, calls."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as profiled:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "trace.json"
        profiled.export_chrome_trace(str(file))
        events = json.loads(file.read_bytes())["traceEvents"]
    shares = on_device(events).kernels or host_shares(events)
    most = sorted(shares.items(), key=lambda item: -item[1].seconds)[:count]
    return [{"name": name, "ms": 1e3 * share.seconds, "calls": share.calls} for name, share in most]


def cap_memory(gib: float, device: torch.device) -> None:
    """Let torch's allocator in this process have so much of the GPU, as if that were smaller; beyond it memory is out.

    What does not come from torch (a CUDA context of about half a GiB, NCCL's buffers) is beside it, and so is what
    another process has. Raises ValueError where the GPU has less.
    """
    total = torch.cuda.get_device_properties(device).total_memory
    if gib * 2**30 > total:
        raise ValueError(f"--gpu-memory {gib:g}: this GPU has {total / 2**30:.1f} GiB; give less, or leave it out")
    torch.cuda.set_per_process_memory_fraction(gib * 2**30 / total, device)


def beside_torch(device: torch.device) -> Record:
    """reserved_gib: the most that torch's allocator had of the GPU. beside_gib: in use there now that it does not have,
    CUDA's own in this process and all of others."""
    free, total = torch.cuda.mem_get_info(device)
    beside = total - free - torch.cuda.memory_reserved(device)
    return {"reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30, "beside_gib": beside / 2**30}
