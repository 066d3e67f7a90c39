"""What the console prints, and what it suppresses."""

import io
import os

import pytest

from qarl.terminal.run_console import RunConsole


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def shown(mode: str, stream: io.StringIO | None = None, **options) -> tuple[RunConsole, io.StringIO]:
    stream = stream or Terminal()
    return RunConsole(mode, stream=stream, **options), stream


def test_without_a_terminal_there_is_one_line_a_step():
    console, stream = shown("rich", io.StringIO(), total_steps=20)
    with console:
        with console.phase("rollout", total=3) as advance:
            advance()
        console.step(1, {"reward/mean": 0.25, "mismatch/delta_abs_max": 0.0, "time/step_s": 12.3456, "other": 1.0})
        console.step(2, {"reward/mean": float("nan")})
    assert stream.getvalue().splitlines() == [
        "step 1/20  reward/mean 0.25  mismatch/delta_abs_max 0  time/step_s 12.35",
        "step 2/20  reward/mean nan",
    ]


def test_a_closed_pipe_silences_the_console():
    read_end, write_end = os.pipe()
    os.close(read_end)
    console = RunConsole("plain", stream=os.fdopen(write_end, "w"))
    console.message("nobody listens")
    assert console.mode == "none"
    with pytest.raises(BrokenPipeError):
        console._stream.close()


def test_the_summary_compares_the_first_quarter_with_the_last(tmp_path):
    console, stream = shown("plain")
    same = {"response/length_mean": 5.0, "mismatch/delta_abs_max": 0.0, "time/step_s": 3.0}
    history = [{"step": i, "reward/mean": float(i), **same} for i in range(1, 9)]
    history[1]["reward/mean"] = None
    console.summary(tmp_path, history, [("to see it:", "tensorboard"), ("to go on:", "qarl train")])
    assert stream.getvalue().splitlines() == [
        f"run: {tmp_path} (8 steps in 0.4 minutes)",
        "reward/mean: 1 over the first 2 steps, 7.5 over the last",
        "response/length_mean: 5 over the first 2 steps, 5 over the last",
        "mismatch/delta_abs_max: 0 in every step: sampler and learner agree bit for bit",
        "to see it:  tensorboard",
        "to go on:   qarl train",
    ]
