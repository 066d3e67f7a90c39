"""Files that a run records: metrics.jsonl, rollouts/, diagnostics/, and the configured trackers.

    metrics.jsonl                 one object per step
    rollouts/NNNNNN.jsonl         sampled completions, one object each
    rollouts/NNNNNN.safetensors   tokens and log-probs of all responses of the same step
    diagnostics/NNNNNN.json       one object (`qarl.diagnostics.record`)

JSON is strict: NaN and infinities are written as null.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from qarl.inputs.files import read_lines
from qarl.inputs.json import strict
from qarl.storage.disk import atomic_write_text, disk_errors, fsync_directory, write_in_run
from qarl.storage.names import remove_later, step_name
from qarl.storage.runs import METRICS, Metrics, parse_record
from qarl.storage.tensorfile import safetensors_chunks, write_file
from qarl.training.trackers import Tracker, build_trackers
from qarl.utils.signals import is_stop
from qarl.utils.text import one_line


class Recorder:
    """Writes metrics, sampled rollouts and diagnostics of one run.

    Call `truncate` with the step that the run starts from (0 for a new run) before the first `log`.

    Args:
        run_dir: The run directory.
        logging: The `logging` section.
        config: The resolved configuration, for trackers that show it.
        warn: Called with one line if a tracker fails; the tracker is dropped and the run continues.

    Attributes:
        step: Last step whose metrics are on disk.

    Raises:
        UserError: A tracker is missing or does not start. Every method raises it if a file cannot be written.
    """

    def __init__(
        self,
        run_dir: Path,
        logging: Any,
        config: dict[str, Any] | None = None,
        warn: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
    ) -> None:
        self.metrics_path = Path(run_dir) / METRICS
        self.rollouts_directory = Path(run_dir) / "rollouts"
        self.diagnostics_directory = Path(run_dir) / "diagnostics"  # created with its first file
        self.step = 0
        self._samples = logging.samples
        self._tensors = logging.rollout_tensors
        self._rollouts_every = logging.rollouts_every
        self._warn = warn
        with disk_errors(self.metrics_path):
            self.rollouts_directory.mkdir(parents=True, exist_ok=True)
            self._file = open(self.metrics_path, "ab", buffering=0)  # noqa: SIM115 - closed by close
        self._trackers = build_trackers(Path(run_dir), logging, config)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Append `{"step": step, **metrics}` durably, then pass the finite values to the trackers.

        If the disk is full, the partial line is removed.

        Args:
            step: Step number.
            metrics: Name -> number or one-element tensor.
        """
        record = {"step": step, **{name: _number(value) for name, value in metrics.items()}}
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        with disk_errors(self.metrics_path, len(line)):
            end = os.fstat(self._file.fileno()).st_size
            try:
                written = 0
                while written < len(line):
                    written += self._file.write(line[written:])
                os.fsync(self._file.fileno())
            except OSError:
                with suppress(OSError):  # report the first error; `truncate` handles a torn line
                    self._file.truncate(end)
                raise
        self.step = step
        self.track(step, record)

    def track(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Pass the finite values to the trackers only, not to metrics.jsonl."""
        numbers = {name: _number(value) for name, value in metrics.items() if name != "step" and value is not None}
        finite = {name: value for name, value in numbers.items() if value is not None}
        self._track(lambda tracker: tracker.log(step, finite))

    def rollouts_due(self, step: int) -> bool:
        """Return whether `logging.rollouts_every` selects this step."""
        return step % self._rollouts_every == 0

    def rollouts(self, step: int, rows: list[dict[str, Any]], tensors: dict[str, Tensor] | None = None) -> None:
        """Write rollouts/NNNNNN.jsonl atomically.

        Args:
            step: Step number.
            rows: JSON values; the first `logging.samples` are written (0: all).
            tensors: Written to rollouts/NNNNNN.safetensors, unless `logging.rollout_tensors` is false.
        """
        path = self.rollouts_directory / f"{step_name(step)}.jsonl"
        kept = rows[: self._samples] if self._samples else rows
        text = "".join(json.dumps(strict({"step": step, **row}), allow_nan=False) + "\n" for row in kept)
        write_in_run(path, text)
        if tensors is not None and self._tensors:
            self._write_tensors(path.with_suffix(".safetensors"), tensors)

    def diagnostics(self, step: int, record: dict[str, Any]) -> None:
        """Write diagnostics/NNNNNN.json atomically."""
        text = json.dumps(strict(record), allow_nan=False) + "\n"
        write_in_run(self.diagnostics_directory / f"{step_name(step)}.json", text)

    def _write_tensors(self, path: Path, tensors: dict[str, Tensor]) -> None:
        temporary = path.with_name(f".{path.name}.tmp")
        with disk_errors(path, sum(tensor.nbytes for tensor in tensors.values())):
            temporary.unlink(missing_ok=True)  # left over from an interrupted write
            try:
                write_file(temporary, safetensors_chunks(tensors))
                os.replace(temporary, path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            fsync_directory(path.parent)

    def truncate(self, step: int) -> None:
        """Remove everything after `step`, from which the run resumes.

        A line that a killed process left incomplete is removed too. Other lines are unchanged.
        """
        with disk_errors(self.metrics_path):
            lines = [line for _, line in read_lines(self.metrics_path)]
            kept = [line for line in lines if (r := parse_record(line, Metrics)) is not None and r["step"] <= step]
            torn = bool(kept) and not kept[-1].endswith(b"\n")  # only its newline is missing
            if len(kept) < len(lines) or torn:
                self._file.close()
                atomic_write_text(self.metrics_path, b"".join(kept).decode() + "\n" * torn)
                self._file = open(self.metrics_path, "ab", buffering=0)  # noqa: SIM115 - closed by close
            folders = [(self.rollouts_directory, ".jsonl"), (self.rollouts_directory, ".safetensors")]
            for folder, suffix in [*folders, (self.diagnostics_directory, ".json")]:
                remove_later(folder, suffix, step)
        self.step = step
        self._track(lambda tracker: tracker.truncate(step))

    def close(self) -> None:
        self._track(lambda tracker: tracker.close())
        self._trackers.clear()
        self._file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _track(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except BaseException as error:  # third-party code and networks must not end the run
                if is_stop(error):
                    raise
                self._trackers.remove(tracker)
                self._warn(f"logging.{tracker.name}: stopped for this run: {one_line(error)}")


class NoRecords(Recorder):
    """Recorder of all ranks but the first: accepts everything and writes nothing."""

    def __init__(self, logging: Any) -> None:
        self.step = 0
        self._rollouts_every = logging.rollouts_every

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.step = step

    def track(self, step: int, metrics: Mapping[str, float | None]) -> None:
        pass

    def truncate(self, step: int) -> None:
        self.step = step

    def close(self) -> None:
        pass


def _number(value: Any) -> float | int | None:
    value = value if isinstance(value, int) else float(value)
    return value if math.isfinite(value) else None
