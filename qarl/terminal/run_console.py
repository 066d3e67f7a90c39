"""Terminal output of a run: progress of long phases, a table of metrics, samples, a summary.

Modes: `rich` is a live display in a terminal, `plain` one short line per step for pipes and logs, `none` silent.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from rich.console import Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from qarl.batch.observer import Observer, Phase
from qarl.config import Config
from qarl.rewards import RewardResult
from qarl.storage.names import checkpoint_steps
from qarl.terminal.console import Console
from qarl.types import Prompt, Rollout
from qarl.utils.averages import mean_of
from qarl.utils.text import visible

TABLE_METRICS = (  # most important first: a narrow terminal shows only the first ones
    "reward/mean",
    "sft/loss",
    "teacher/divergence",
    "response/length_mean",
    "mismatch/delta_abs_max",
    "policy/entropy",
    "time/step_s",
    "response/truncated_frac",
    "policy/grad_norm",
    "quant/codes_changed_frac",
)
TABLE_ROWS = 8
SHOWN_SAMPLES = 3
SHOWN_CHARACTERS = 600
SHOWN_FAILURES = 3  # failed rewards per step that are printed individually
SLOW_SECONDS = 1.0  # shorter phases are not shown
STEP_PHASES: dict[Phase, str] = {"rollout": "rollout", "reward": "rewards", "learner": "learner"}


class _Count(ProgressColumn):
    """`3/64 responses`; empty for a phase of unknown length."""

    def render(self, task: Task) -> Text:
        return Text("" if task.total is None else f"{task.completed:.0f}/{task.total:.0f} responses")


class RunConsole:
    """Display of one run. A context manager, which restores the terminal.

    If the stream fails (closed pipe, lost terminal), the console becomes silent and the run continues.

    Args:
        mode: `logging.console`: `rich`, `plain` or `none`. `rich` becomes `plain` if the stream is not a terminal.
        total_steps: Number of steps, shown after the step number.
        stream: Where to print. Default: stdout.
    """

    def __init__(self, mode: str, total_steps: int | None = None, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._console = Console(self._stream)
        self.mode = "plain" if mode == "rich" and not self._console.is_terminal else mode
        self._total_steps = total_steps
        self._history: deque[dict[str, Any]] = deque(maxlen=TABLE_ROWS)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            _Count(),
            TimeElapsedColumn(),
            console=self._console,
            auto_refresh=False,
        )
        self._live: Live | None = None

    def __enter__(self) -> RunConsole:
        if self.mode == "rich":
            self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Callable[..., None]]:
        """Show progress while the body runs, starting one second into it.

        In plain mode, only slow phases before the first step are printed; later ones are in `time/*_s`.

        Args:
            name: Name of the phase.
            total: Number of responses to process, if they take most of the time.

        Yields:
            `advance(n=1)`, which adds to the number of processed responses.
        """
        started = time.monotonic()
        task = self._progress.add_task(name, total=total)
        try:
            yield lambda n=1: self._progress.advance(task, n)
        finally:
            self._progress.remove_task(task)
        elapsed = time.monotonic() - started
        if elapsed >= SLOW_SECONDS and not self._history and self.mode == "plain":
            self.message(f"{name}: {elapsed:.1f} s")

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Add one step to the table (rich) or print its line (plain)."""
        self._history.append({"step": step, **metrics})
        if self.mode == "plain":
            shown = "  ".join(f"{name} {_format(metrics[name])}" for name in TABLE_METRICS if name in metrics)
            self.message(f"step {self._step_text(step)}  {shown}")

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Print `prompt`, `completion` (untrusted text) and `reward` of the first rows."""
        for number, row in enumerate(rows[:SHOWN_SAMPLES], 1):
            head = f"step {step}, sample {number}, reward {_format(row.get('reward'))}"
            multiline = self.mode == "rich"
            prompt = visible(_clip(str(row.get("prompt", "")), tail=True), multiline)
            completion = visible(_clip(str(row.get("completion", ""))), multiline)
            if multiline:
                self._print(Text.assemble((head, "bold"), "\n", (prompt, "dim"), (completion, "green"), "\n"))
            else:
                self.message(f"{head}: {prompt} => {completion}")

    def message(self, text: str) -> None:
        """Print one line without markup; control characters are escaped."""
        self._print(Text(visible(text)))

    def warn(self, text: str) -> None:
        """Print a warning; control characters are escaped."""
        self._print(Text(f"warning: {visible(text)}", style="yellow"))

    def summary(self, run_dir: Path, history: list[dict[str, Any]], next_commands: list[tuple[str, str]]) -> None:
        """Print the run directory, the change from the first to the last quarter of the run, and follow-up commands.

        Args:
            run_dir: The run directory.
            history: Records of metrics.jsonl, oldest first.
            next_commands: (purpose, command) pairs.
        """
        lines = [f"run: {run_dir}"]
        if history:
            minutes = sum(record.get("time/step_s") or 0.0 for record in history) / 60
            lines[0] += f" ({history[-1]['step']} steps in {minutes:.1f} minutes)"
            quarter = max(1, len(history) // 4)
            span = "step" if quarter == 1 else f"{quarter} steps"
            for name in ("reward/mean", "sft/loss", "teacher/divergence", "response/length_mean"):
                if name not in history[-1]:
                    continue
                first, last = mean_of(history[:quarter], name), mean_of(history[-quarter:], name)
                lines.append(f"{name}: {_format(first)} over the first {span}, {_format(last)} over the last")
            if "mismatch/delta_abs_max" in history[-1]:
                gaps = [record.get("mismatch/delta_abs_max") for record in history]
                worst = None if None in gaps else max(gap for gap in gaps if gap is not None)  # null: not finite
                agreement = "in every step: sampler and learner agree bit for bit" if worst == 0 else "at most"
                lines.append(f"mismatch/delta_abs_max: {_format(worst)} {agreement}")
        width = max((len(purpose) for purpose, _ in next_commands), default=0)
        for line in [*lines, *(f"{purpose:{width}}  {command}" for purpose, command in next_commands)]:
            self.message(line)

    def _step_text(self, step: int) -> str:
        return f"{step}/{self._total_steps}" if self._total_steps else str(step)

    def _print(self, text: Text) -> None:
        if self.mode == "none":
            return
        # A stream that is not UTF-8 gets escapes instead of raising UnicodeEncodeError.
        encoding = self._console.encoding
        if text.plain.encode(encoding, "replace").decode(encoding) != text.plain:
            text.plain = text.plain.encode(encoding, "backslashreplace").decode(encoding)
        try:
            if self.mode == "rich":
                self._console.print(text)
            else:
                self._stream.write(text.plain + "\n")
                self._stream.flush()
        except (OSError, ValueError):  # ValueError: the stream was closed
            self.mode = "none"

    def _render(self) -> RenderableType:
        slow = [task for task in self._progress.tasks if (task.elapsed or 0.0) >= SLOW_SECONDS]
        parts: list[RenderableType] = [self._table()] if self._history else []
        if slow:
            parts.append(self._progress.make_tasks_table(slow))
        return Group(*parts)

    def _table(self) -> Table:
        """Return a table of as many of TABLE_METRICS as fit the terminal's width, at least one."""
        rows = list(self._history)  # the display thread reads while the training loop appends
        names = [name for name in TABLE_METRICS if any(name in row for row in rows)]
        unbounded = self._console.options.update(max_width=1000)
        while True:
            table = Table("step", *(name.replace("/", "\n").replace("_", "\n") for name in names))
            for column in table.columns:
                column.justify = "right"
            for row in rows:
                table.add_row(self._step_text(row["step"]), *(_format(row.get(name)) for name in names))
            if len(names) <= 1 or Measurement.get(self._console, unbounded, table).maximum <= self._console.width:
                return table
            names.pop()


def next_commands(config: Config, ranks: int) -> list[tuple[str, str]]:
    """Return suggested commands after a finished run: (purpose, shell command).

    Args:
        config: Configuration of the run.
        ranks: Number of ranks of the run.
    """
    directory = shlex.quote(str(config.run_dir))
    # Use the path next to this Python if a program is not on PATH, as with a .venv that is not activated.
    programs = Path(sys.executable).parent
    with suppress(FileNotFoundError):  # the working directory may have been removed during the run
        if programs.is_relative_to(Path.cwd()):
            programs = programs.relative_to(Path.cwd())
    python, board, qarl = (
        n if shutil.which(n) else shlex.quote(str(programs / n)) for n in ("python", "tensorboard", "qarl")
    )
    commands = []
    last = config.train.steps - config.train.steps % config.logging.rollouts_every
    if last and not config.given:
        answers = f"{directory}/rollouts/{last:06d}.jsonl"
        commands.append(("to read its answers:", f"{python} -m json.tool --json-lines {answers}"))
    if config.logging.tensorboard:
        commands.append(("to see its curves:", f"{board} --logdir {directory}/tensorboard"))
    commands.append(("to see it on a page:", f"{qarl} report {directory}"))
    if checkpoint_steps(config.run_dir / "checkpoints"):
        commands.append(("to export it:", f"{qarl} export {directory}"))
    other = _other_scheme(config)
    out = shlex.quote(f"{config.run_dir}-compare")
    schemes = f"--schemes {config.quant.scheme},{other} --reuse {directory} --out {out}"
    commands.append((f"to compare with {other}:", f"{qarl} compare {directory}/config.yaml {schemes}"))
    on_ranks = f" --nproc {ranks}" if ranks > 1 else ""
    more = f"{qarl} train {directory}/config.yaml train.steps={2 * config.train.steps}{on_ranks}"
    return [*commands, ("to train it further:", more)]


def _other_scheme(config: Config) -> str:
    """Return a scheme to compare a run with: bf16, or an 8-bit scheme if the run is bf16 or needs quantization."""
    unquantized = config.quant.scheme != "bf16" and config.quant.learner != "fake_quant"
    return "bf16" if unquantized else "fp8" if config.quant.scheme == "w8a8" else "w8a8"


class StepDisplay(Observer):
    """Observer that shows the progress and the failed rewards of a step on `console`."""

    def __init__(self, console: RunConsole) -> None:
        self._console = console
        self._advance: Callable[..., None] | None = None

    @contextmanager
    def phase(self, name: Phase, responses: int | None) -> Iterator[None]:
        if name not in STEP_PHASES:
            yield
            return
        with self._console.phase(STEP_PHASES[name], responses) as self._advance:
            yield

    def progress(self, responses: int) -> None:
        if self._advance is not None:
            self._advance(responses)

    def scored(self, prompts: list[Prompt], rollouts: list[Rollout], scores: RewardResult) -> None:
        for message in scores.messages[:SHOWN_FAILURES]:
            self._console.warn(message)
        if len(scores.messages) > SHOWN_FAILURES:
            left = len(scores.messages) - SHOWN_FAILURES
            self._console.warn(f"and {left} more failed rewards in this step; see rewards.log")


def _clip(text: str, tail: bool = False) -> str:
    if len(text) <= SHOWN_CHARACTERS:
        return text
    return "..." + text[-SHOWN_CHARACTERS:] if tail else text[:SHOWN_CHARACTERS] + "..."


def _format(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    value = float(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2e}"
    return f"{value:.4g}"
