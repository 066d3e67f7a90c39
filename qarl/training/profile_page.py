"""Table of a profiled step (`train.profile`): time and FLOP/s per phase, and the top kernels."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qarl.utils.text import shortened

Event = Mapping[str, Any]  # Chrome trace format; `ts` and `dur` are in microseconds

PREFIX = "qarl/"  # prefix of phase names in the trace
PHASES = ("rollout", "reward", "learner", "publish")
# Disjoint parts of the learner's phase, in the order of a step.
PARTS = {
    "snapshot": "log-probs of later minibatches",
    "forward": "forward",
    "backward": "loss and backward",
    "optimizer": "optimizer and quantization",
}
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
TOP = 25  # number of kernels listed
NAME = 100  # maximum length of a kernel's name

NOTE = """\
Seconds are wall time with the profiler on, including a GPU synchronization at the end of each phase. Device seconds
sum kernels and copies by the phase that launched them; if they are far below the seconds, the phase is host-bound.
FLOPs are those of matrix products and attention, a backward counting as two forwards; recomputation and the forwards of
reference and shadow are not counted. Bytes are the minimum that AdamW, clipping and quantization must move, or the
published bytes.
"""


@dataclass
class Share:
    """Totals of one phase or one kernel."""

    seconds: float = 0.0
    calls: int = 0
    bytes: float = 0.0

    def add(self, seconds: float, moved: float = 0.0) -> None:
        """Add a call that took `seconds` and moved `moved` bytes."""
        self.seconds += seconds
        self.calls += 1
        self.bytes += moved


@dataclass
class Device:
    """Device time per phase and part, and per kernel."""

    phases: defaultdict[str, Share] = field(default_factory=lambda: defaultdict(Share))
    kernels: defaultdict[str, Share] = field(default_factory=lambda: defaultdict(Share))


def page(
    events: Sequence[Event],
    step: int,
    device: str,
    seconds: Mapping[str, float],
    flops: Mapping[str, float],
    known_bytes: Mapping[str, float],
) -> str:
    """Render the profile of one step as Markdown.

    Args:
        events: Events of the trace.
        step: Step number.
        device: Name of the device.
        seconds: Wall time in seconds, per phase in `PHASES`.
        flops: FLOPs per phase or part, where known.
        known_bytes: Bytes moved per phase or part, where known.
    """
    found = on_device(events)
    flops = {**flops, "learner": sum(flops.get(name, 0.0) for name in PARTS)}
    parts = {name: duration for name in PARTS if (duration := _duration(events, name))}
    lines = [
        f"# Profile of step {step}",
        "",
        f"{device}. Open the trace next to this page in chrome://tracing or ui.perfetto.dev.",
        "",
        "| phase | seconds | device seconds | kernels | TFLOP | TFLOP/s | TFLOP/s of device time | GB/s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for phase in PHASES:
        lines.append(_phase_line(phase, phase, seconds[phase], found, flops, known_bytes))
        if phase == "learner":
            for part, duration in parts.items():
                lines.append(_phase_line(f"- {PARTS[part]}", part, duration, found, flops, known_bytes))
            rest = f"{seconds[phase] - sum(parts.values()):.3f}"
            lines.append(_row("- other", rest, *[""] * 6))
    return "\n".join([*lines, "", NOTE, *_kernel_lines(events, found)]) + "\n"


def on_device(events: Sequence[Event]) -> Device:
    """Sum device time per kernel, and per phase and part by the time of the launch on the host."""
    launched: dict[Any, float] = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {})
    }
    ranges = {name: _Ranges([event for event in events if is_range(event, name)]) for name in (*PARTS, *PHASES)}
    found = Device()
    for event in events:
        if event.get("cat") not in ON_DEVICE:
            continue
        arguments = event.get("args", {})
        took, moved = 1e-6 * event["dur"], float(arguments.get("bytes", 0))
        found.kernels[event["name"]].add(took, moved)
        start = launched.get(arguments.get("correlation"), float(event["ts"]))
        for name, intervals in ranges.items():  # a part's time also counts for its phase
            if start in intervals:
                found.phases[name].add(took, moved)
    return found


def host_shares(events: Sequence[Event]) -> dict[str, Share]:
    """Return self time on the host per operation, without the time of operations that it calls."""
    shares: defaultdict[str, Share] = defaultdict(Share)
    threads: defaultdict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            threads[event["pid"], event["tid"]].append(event)
    for own in threads.values():
        callers: list[Event] = []
        for event in sorted(own, key=lambda event: (event["ts"], -event["dur"])):
            while callers and event["ts"] >= callers[-1]["ts"] + callers[-1]["dur"]:
                callers.pop()
            shares[event["name"]].add(1e-6 * event["dur"])
            if callers:
                shares[callers[-1]["name"]].seconds -= 1e-6 * event["dur"]
            callers.append(event)
    return shares


class _Ranges:
    """Disjoint time intervals; `moment in ranges` tests membership."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._ranges = sorted((event["ts"], event["ts"] + event["dur"]) for event in events)
        self._starts = [start for start, _ in self._ranges]

    def __contains__(self, moment: float) -> bool:
        index = bisect_right(self._starts, moment) - 1
        return index >= 0 and moment <= self._ranges[index][1]


def is_range(event: Event, name: str) -> bool:
    """Return whether an event is the host-side range of a phase or part."""
    return event.get("cat") == "user_annotation" and event.get("name") == PREFIX + name


def _duration(events: Sequence[Event], name: str) -> float:
    """Return the total seconds of a phase or part."""
    return 1e-6 * sum(event["dur"] for event in events if is_range(event, name))


def _phase_line(
    label: str,
    name: str,
    seconds: float,
    found: Device,
    flops: Mapping[str, float],
    known_bytes: Mapping[str, float],
) -> str:
    device = found.phases.get(name, Share())
    tera = flops.get(name, 0.0) / 1e12
    return _row(
        label,
        f"{seconds:.3f}",
        f"{device.seconds:.3f}" if device.calls else "",
        f"{device.calls}" if device.calls else "",
        f"{tera:.4g}" if tera else "",
        f"{tera / seconds:.4g}" if tera else "",
        f"{tera / device.seconds:.4g}" if tera and device.seconds else "",
        f"{known_bytes[name] / 1e9 / (device.seconds or seconds):.4g}" if name in known_bytes else "",
    )


def _kernel_lines(events: Sequence[Event], found: Device) -> list[str]:
    """List the kernels with the most device time or, without a device, the operations with the most self time."""
    shares, what = (found.kernels, "kernel") if found.kernels else (host_shares(events), "operation")
    total = sum(share.seconds for share in shares.values())
    if not total:
        return []
    lines = [f"| {what} | ms | share | calls | GB/s |", "| --- | --- | --- | --- | --- |"]
    for name, share in sorted(shares.items(), key=lambda item: -item[1].seconds)[:TOP]:
        rate = f"{share.bytes / share.seconds / 1e9:.4g}" if share.bytes else ""
        cells = f"{1e3 * share.seconds:.2f}", f"{share.seconds / total:.1%}", f"{share.calls}", rate
        lines.append(_row(f"`{shortened(name, NAME).replace('|', '/')}`", *cells))
    where = "all kernels and copies" if found.kernels else "all operations"
    return [*lines, _row(where, f"{1e3 * total:.2f}", "", f"{sum(share.calls for share in shares.values())}", "")]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
