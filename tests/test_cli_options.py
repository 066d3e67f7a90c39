"""Options of every command are validated like the configuration; each fault is one line with exit code 2."""

import os
import re
from pathlib import Path

import pytest
import typer
import typer.models

from qarl import cli
from qarl.cli import app
from qarl.inputs.paths import NAME_BYTES

COMMANDS = typer.main.get_command(app).commands
PARAMETERS = [
    (name, parameter) for name, command in COMMANDS.items() for parameter in command.params if parameter.name != "help"
]
LINE = re.compile(r"error: .*\n", re.ASCII)

UNUSABLE = {
    **{"empty": "", "nul": "a\0b", "no such user": "~nosuchuser/x", "long name": "x" * (NAME_BYTES + 1)},
    **{"loop": "loop", "pipe": "pipe"},
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch) -> Path:
    """A working directory with one of each kind of path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("text")
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(argv))
    return caught.value.code or 0


def paths_of(kinds: tuple[str, ...]) -> list[tuple[str, list[str], str]]:
    """(command, arguments up to the value, what the line starts with) of every path and name there is."""
    found = []
    for name, parameter in PARAMETERS:
        if parameter.metavar in kinds and name not in ("train", "check", "compare"):
            option = next((text for text in parameter.opts if text.startswith("--")), None)
            before = [] if option else ["x"] * [p.name for p in COMMANDS[name].params].index(parameter.name)
            found.append((name, [*before, option] if option else before, option or parameter.metavar.strip("[]")))
    return found


PATHS = paths_of(("DIR", "FILE", "OUT", "[OUT]", "RUN", "ROOT", "MODEL", "RUN|CHECKPOINT|MODEL"))


# What may be a hub's name is no path to look at, and a prompt may come from a pipe.
NAMES = {"RUN|CHECKPOINT|MODEL", "MODEL", "--model", "export RUN"}


def wrong_kinds(command: str, starts: str) -> list[str]:
    return [
        kind
        for kind in UNUSABLE
        if not (kind in ("loop", "pipe") and {starts, f"{command} {starts}"} & NAMES)
        and (kind, starts) != ("pipe", "--prompt-file")
    ]


# Two kinds per option, in turn, so that all kinds are given to several options.
WRONG = [
    (command, before, starts, kinds[i % len(kinds)])
    for turn, (command, before, starts) in enumerate(PATHS)
    for kinds in [wrong_kinds(command, starts)]
    for i in (2 * turn, 2 * turn + 1)
]


@pytest.mark.parametrize(("command", "before", "starts", "kind"), WRONG, ids=[f"{c} {s} {k}" for c, _, s, k in WRONG])
def test_a_path_that_can_be_none_is_one_line_that_names_its_option(command, before, starts, kind, place, capsys):
    required = [] if not starts.startswith("--") else ["x", "x"][: 2 if command == "quantize" else 1]
    scheme = ["--scheme", "fp8"] if command == "quantize" else []
    assert run(command, *required, *scheme, *before, UNUSABLE[kind]) == 2
    out, error = capsys.readouterr()
    assert out == "" and LINE.fullmatch(error), error
    assert error.startswith(f"error: {starts}: '")


COUNTS = ("--n", "--step", "--seed", "--jobs", "--max-tokens", "--max-new-tokens", "--max-prompts", "--group-size")
NUMBERS = [(name, parameter.opts[0]) for name, parameter in PARAMETERS if parameter.opts[0] in COUNTS]
BAD_NUMBERS = ["x", "", "1.5", "nan", "-2", "9" * 20, "9" * 5000, "²"]
BAD = [(*pair, BAD_NUMBERS[(3 * turn + i) % 8]) for turn, pair in enumerate(NUMBERS) for i in range(1)]


@pytest.mark.parametrize(("command", "option", "value"), BAD, ids=[f"{c} {o} {v[:20]}" for c, o, v in BAD])
def test_a_number_out_of_its_range_is_one_line_that_names_its_option(command, option, value, place, capsys):
    arguments = {"quantize": ["x", "y", "--scheme", "w4a16"], "compare": ["--offline", "x", "--schemes", "w4a16"]}
    assert run(command, *arguments.get(command, ["folder"]), option, value) == 2
    out, error = capsys.readouterr()
    assert out == "" and LINE.fullmatch(error), error
    assert error.startswith((f"error: {option}: ", f"error: option '{option}' requires")), error


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["nope"], "error: no such command 'nope'; see qarl --help"),
        (["check"], "error: CONFIG: is required; see qarl check --help"),
        (["generate", "x", "--n", "0"], "error: --n: must be greater than or equal to 1; see qarl generate --help"),
        (["generate", "x", "--n"], "error: option '--n' requires an argument; see qarl"),
        (["generate", "x", "--nn", "1"], "error: no such option: --nn (Possible options: --"),
        (
            ["generate", "x", "--kv-cache-dtype", "int8"],
            "error: --kv-cache-dtype: 'int8' is not one of 'auto', 'fp8'; see",
        ),
        (["schema", "--nope\n"], "error: no such option: --nope"),
    ],
)
def test_wrong_usage_is_one_line(argv, line, capsys):
    assert run(*argv) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and error.startswith(line), error


def test_help_is_printed(capsys):
    assert run("--help") == 0 and "Commands" in capsys.readouterr().out
    assert run("eval", "--help") == 0 and "--temperature" in capsys.readouterr().out
    assert run() == 2 and "Usage: qarl" in "".join(capsys.readouterr())
