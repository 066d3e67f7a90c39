"""The table beside a trace of `train.profile`: seconds and FLOP/s of each phase, and the top kernels."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = Mapping[str, Any]  # of the Chrome trace format: `ts` and `dur` are microseconds

PREFIX = "qarl/"  # of the names of phases among a trace's ranges
PHASES = ("rollout", "reward", "learner", "publish")
# Of the learner's phase, disjoint, in the order of a step.
PARTS = {
    "snapshot": "log-probs of later minibatches",
    "forward": "forward",
    "backward": "loss and backward",
    "optimizer": "optimizer and quantization",
}
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
TOP = 25  # kernels that are listed
NAME = 100  # characters of a kernel's name

NOTE = """\
Seconds are wall time with the profiler on; the GPU is waited for at the end of each phase. Device seconds are the sum
over kernels and copies, by where they were launched; a phase that has far fewer of them than seconds waits for the
host. FLOP count the model's products and attention once, a backward as two forwards: what is recomputed, and forwards
of a reference or shadow, are time without FLOP. Bytes are what AdamW, clipping and quantizing must move at least, or
what was published.
"""


@dataclass
class Share:
    """Sums over the calls of one phase, or of one kernel."""

    seconds: float = 0.0
    calls: int = 0
    bytes: float = 0.0

    def add(self, seconds: float, count: float = 0.0) -> None:
        self.seconds += seconds
        self.calls += 1
        self.bytes += count


@dataclass
class Device:
    """Time on the device: of each phase and part, and of each kernel."""

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
    """The page as Markdown.

    events: of the trace. seconds: wall time of each of `PHASES`. flops, known_bytes: by phase or part, where known.
    """
    found = on_device(events)
    flops = {**flops, "learner": sum(flops.get(name, 0.0) for name in PARTS)}
    parts = {name: duration for name in PARTS if (duration := _duration(events, name))}
    lines = [
        f"# Profile of step {step}",
        "",
        f"{device}. The trace is beside this page: chrome://tracing or ui.perfetto.dev reads it.",
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
            lines.append(_row("- the rest", rest, *[""] * 6))
    return "\n".join([*lines, "", NOTE, *_kernel_lines(events, found)]) + "\n"


def on_device(events: Sequence[Event]) -> Device:
    """What ran on the device, in the learner's phase and in publishing, by the place of its launch."""
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
        for name, intervals in ranges.items():  # a part's time is its phase's too
            if start in intervals:
                found.phases[name].add(took, moved)
    return found


def host_shares(events: Sequence[Event]) -> dict[str, Share]:
    """Each operation's own time on the host, without that of the operations it calls."""
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
    """Disjoint intervals of time, asked whether a moment is in one of them."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._ranges = sorted((event["ts"], event["ts"] + event["dur"]) for event in events)
        self._starts = [start for start, _ in self._ranges]

    def __contains__(self, moment: float) -> bool:
        index = bisect_right(self._starts, moment) - 1
        return index >= 0 and moment <= self._ranges[index][1]


def is_range(event: Event, name: str) -> bool:
    """Whether an event is the time that the host spent in a phase or part of that name."""
    return event.get("cat") == "user_annotation" and event.get("name") == PREFIX + name


def _duration(events: Sequence[Event], name: str) -> float:
    """Seconds of all ranges of a phase or part."""
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
    """The kernels with the most device time; without a device, the operations with the most time of their own."""
    shares, what = (found.kernels, "kernel") if found.kernels else (host_shares(events), "operation")
    total = sum(share.seconds for share in shares.values())
    if not total:
        return []
    lines = [f"| {what} | ms | share | calls | GB/s |", "| --- | --- | --- | --- | --- |"]
    for name, share in sorted(shares.items(), key=lambda item: -item[1].seconds)[:TOP]:
        rate = f"{share.bytes / share.seconds / 1e9:.4g}" if share.bytes else ""
        shown = name if len(name) <= NAME else name[: NAME - 3] + "..."
        cells = f"{1e3 * share.seconds:.2f}", f"{share.seconds / total:.1%}", f"{share.calls}", rate
        lines.append(_row(f"`{shown.replace('|', '/')}`", *cells))
    where = "all kernels and copies" if found.kernels else "all operations"
    return [*lines, _row(where, f"{1e3 * total:.2f}", "", f"{sum(share.calls for share in shares.values())}", "")]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
