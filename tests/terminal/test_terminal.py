"""Texts from outside are printed inert in every way: names, values, completions, messages, errors."""

import io
import logging
import os
import random
import re
import subprocess
import sys
import unicodedata
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
import yaml
from plain_settings import plain_settings, write_model
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from qarl import cli
from qarl.terminal.console import Console
from qarl.terminal.run_console import RunConsole
from qarl.terminal.streams import inert_output
from qarl.utils.text import visible

ATTACKS = [
    *["\x1b[2J\x1b[H", "\x1b]0;title\x07", "\x1b]52;c;cm0gLXJmIC8=\x07"],
    *["\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\", "\x1b[8mhidden", "\x1b[31mred", "\x1bc"],
    *["\x1bP$q\x1b\\", "\x9b31m", "\x9d0;t\x9c", "\r all fine", "\x08\x08\x08", "\x07", "\x00", "\x7f"],
    *["\x0b\x0c", "\x85", "\u2028", "\u2029", "\u202eevil", "\u2066x\u2069", "\u200b\u200d\ufeff", "\u061c"],
    *["\ud800", "\udcff", "\U000e0041", "\u00ad", "[red]", "[/red]", "[link=http://evil]x[/link]", "[bold"],
    *["[/]", "\\[x]", ":smile:", "{0}", "%s", "\t", "\x1b", "a\\"],
]
HARMLESS = ["x", " ", "name", "π", "数", "é", "/", ".", "-", "=", "'", '"', "#", ": "]
MOVEMENTS = re.compile(r"\x1b\[\?25[lh]|\x1b\[[0-9]*[AK]|\r")  # of the cursor, rich's own
SGR = re.compile(r"\x1b\[[0-9;]*m")


def hostile_texts(count: int = 12, seed: int = 14) -> list[str]:
    """Return each attack alone, then mixtures of them with harmless text."""
    stream = random.Random(seed)
    mixed = ["".join(stream.choices(ATTACKS + HARMLESS, k=stream.randint(2, 7))) for _ in range(count)]
    return [*ATTACKS, *mixed]


def packed(texts: list[str], size: int = 4) -> list[str]:
    """Return the texts joined in groups of `size`."""
    return ["x".join(texts[at : at + size]) for at in range(0, len(texts), size)]


TEXTS = hostile_texts()
NAMES = [  # possible file names; bytes that are not UTF-8 are lone surrogates
    text.replace("/", "|").replace("\0", "0").replace("\ud800", "\udced\udca0\udc80")[:80] for text in packed(TEXTS, 3)
]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def driving(text: str, colours: bool = False) -> list[str]:
    """Return the printed characters that control a terminal. colours: ignore rich's own colours."""
    text = SGR.sub("", text) if colours else text
    return [char for char in text if char != "\n" and unicodedata.category(char) in {"Cc", "Cf", "Cs", "Zl", "Zp"}]


def run(monkeypatch: pytest.MonkeyPatch, *argv: object, tty: bool = False) -> tuple[int, str, str]:
    """Run the command line in this process. Returns exit code, stdout and stderr."""
    out, err = (Terminal() if tty else io.StringIO() for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("TERM", "xterm-256color")
    with pytest.raises(SystemExit) as ended:
        cli.main([str(arg) for arg in argv])
    assert (sys.stdout, sys.stderr) == (out, err)
    return ended.value.code or 0, out.getvalue(), err.getvalue()


# --- ways to print


def table(text: str) -> Table:
    made = Table(text, title=text, caption=text)
    made.add_column(Text(text))
    made.add_row(text, Text(text))
    return made


WAYS: dict[str, Callable[[str], object]] = {
    "print": print,
    "echo": typer.echo,
    "warn": lambda text: warnings.warn(text, stacklevel=1),
    "log": lambda text: logging.getLogger("some.library").warning("%s", text),
    "console": lambda text: Console().print(text),
    "panel": lambda text: Console(stderr=True).print(Panel(text, title=Text(text))),
    "table": lambda text: Console().print(table(text)),
    "message": lambda text: RunConsole("plain").message(text),
    "warning at a terminal": lambda text: RunConsole("rich").warn(text),
    "samples": lambda text: RunConsole("plain").samples(1, [{"prompt": text, "completion": text, "reward": 1.0}]),
    "summary": lambda text: RunConsole("rich").summary(Path(text), [], [(text, text)]),
}


@pytest.mark.parametrize("tty", [False, True], ids=["pipe", "terminal"])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_that_is_printed_drives_the_terminal(way: str, tty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("TERM", "xterm-256color")
    logging.getLogger().handlers.clear()  # pytest's, so that the last resort of logging prints
    for text in TEXTS:
        out, err = (Terminal() if tty else io.StringIO() for _ in range(2))
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        with inert_output(), warnings.catch_warnings():
            warnings.simplefilter("always")
            monkeypatch.setattr(warnings, "showwarning", lambda message, *_: print(message, file=sys.stderr))
            WAYS[way](text)
        printed = out.getvalue() + err.getvalue()
        assert driving(printed, colours=tty) == [], text
        if "[red]" in text and "\n" not in text and way != "summary":
            assert "[red]" in SGR.sub("", printed), "markup is shown as it is spelled"
        if "\x1b[31m" in text and way in ("print", "message", "console"):
            assert "\\x1b[31m" in printed


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_prints_during_a_live_display_are_inert(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """rich captures such prints, with colours and links, and shows them above the display."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm-256color")
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", out)
    with inert_output(), RunConsole("rich") as console:
        console.step(1, {"reward/mean": 1.0})
        for text in TEXTS:
            print(text, file=getattr(sys, stream), flush=True)
            with console.phase(text):
                pass
    assert driving(MOVEMENTS.sub("", out.getvalue()), colours=True) == []
    assert "evil" in out.getvalue() and "]8;" not in SGR.sub("", out.getvalue()).replace("\\x1b]8;", "")


def test_visible_text_is_unchanged() -> None:
    for text in TEXTS:
        once = visible(text)
        assert visible(once) == once and once.isprintable()
        assert visible(text, keep_newlines=True).replace("\n", "").isprintable()
    assert visible("plain π 数 \\x1b[31m") == "plain π 数 \\x1b[31m"


# --- commands


@pytest.fixture
def config(tmp_path: Path) -> dict:
    return plain_settings(
        **{"model": {"path": str(write_model(tmp_path / "model"))}, "quant": {"group_size": 32}},
        **{"data": {"max_prompt_length": 64}, "rollout": {"max_response_length": 64}, "train": {"run_dir": "runs/x"}},
    )


def test_names_of_runs(config, tmp_path, monkeypatch) -> None:
    root = tmp_path / "runs"
    made = 0
    for name in NAMES:
        try:
            (root / name).mkdir(parents=True)
        except (OSError, ValueError):  # ".", "..", what UTF-8 lacks
            continue
        made += 1
        (root / name / "config.yaml").write_text(yaml.safe_dump(config) if made % 3 else "[")
        (root / name / "metrics.jsonl").write_text('{"step": 1}\n')
    assert made > 10
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = run(monkeypatch, "runs", root, tty=True)
    assert code == 0 and driving(out + err, colours=True) == []
    assert "[red]" in out + err and "unreadable" in err
    assert driving(run(monkeypatch, "runs", root, "--json")[1]) == []


# --- streams that fail


def start(argv: str, redirection: str, **environment: str) -> subprocess.CompletedProcess:
    command = f"{sys.executable} -m qarl.cli {argv} {redirection}"
    path = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        timeout=60,
        check=False,
    )


CUT = b"error: standard output: cannot be written: No space left on device; the output is incomplete\n"
NO_FILE = rb"error: \udcff\x1b[2J\u202e.yaml: no such file; give the path of a YAML configuration, see configs/" + b"\n"


@pytest.mark.parametrize(
    ("argv", "redirection", "code", "out", "err"),
    [
        ("schema", "| head -1", 0, b"{\n", b""),
        ("schema", "<&- >&- 2>&-", 0, b"", b""),
        ("schema", "> /dev/full", 2, b"", CUT),
        (r"check $'\xff\x1b[2J\u202e.yaml'", "", 2, b"", NO_FILE),
    ],
)
def test_the_command_ends_quietly_whatever_its_streams(argv, redirection, code, out, err) -> None:
    done = start(argv, redirection)
    assert (done.returncode, done.stdout, done.stderr) == (code, out, err)


def test_a_stream_that_is_not_utf8_gets_escapes() -> None:
    done = start("check π数.yaml", "", PYTHONIOENCODING="ascii")
    assert done.returncode == 2 and rb"\u03c0\u6570.yaml" in done.stderr and b"Traceback" not in done.stderr
    assert done.stderr.startswith(b"error: ") and done.stderr.count(b"\n") == 1
