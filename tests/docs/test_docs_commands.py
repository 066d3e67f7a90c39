"""Every command that the documentation shows is one: `qarl` parses it, make has it, the script has its options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from pages import IDS, PAGES, ROOT, known_keys, shell_lines, spans

from qarl.cli import app

OVERRIDE = re.compile(r"[a-z_]+\.[\w.]+=.*")


def words(line: str) -> list[str]:
    return shlex.split(line, comments=True)


def commands(page: Path) -> list[list[str]]:
    """What begins like a command, in blocks and in the text; in the text a name alone stands for itself."""
    found = [words(line) for line in shell_lines(page)]
    inline = [words(span) for span in spans(page) if span.startswith(("qarl ", "make ")) and "..." not in span]
    return [command for command in [*found, *inline] if command]


def check_qarl(arguments: list[str], alone: bool) -> None:
    group = typer.main.get_command(app)
    context = group.make_context("qarl", list(arguments), resilient_parsing=True)
    if arguments[0].startswith("--"):
        assert any(arguments[0] in parameter.opts for parameter in group.params), arguments
        return
    name, command, rest = group.resolve_command(context, list(arguments))
    assert command is not None
    if alone and len(arguments) == 1:
        return
    if rest == ["--help"]:
        return
    parsed = command.make_context(name, rest, parent=context)
    parsed.close()
    for argument in rest:
        if OVERRIDE.fullmatch(argument):
            assert re.sub(r"\.\d+\b", "", argument.partition("=")[0]) in known_keys(), argument


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_command_is_one(page: Path):
    makefile = (ROOT / "Makefile").read_text()
    for command in commands(page):
        program, *arguments = command
        if program == "qarl":
            check_qarl(arguments, alone=len(command) == 2)
        elif program == "make":
            for argument in arguments:
                wanted = rf"^{argument.partition('=')[0]} \?=" if "=" in argument else rf"^{argument}:"
                assert re.search(wanted, makefile, re.MULTILINE), command
        elif program.endswith("python") and arguments[0].startswith(("tools/", "examples/")):
            script = ROOT / arguments[0]
            assert script.exists(), command
            text = script.read_text() + (ROOT / "examples/example_model.py").read_text()
            for option in arguments[1:]:
                if option.startswith("--"):
                    known = f'"{option}"' in text or f"{option.removeprefix('--')}=" in text
                    assert known, f"{command}: {option}"


def test_commands_are_found_at_all():
    found = [command for page in PAGES for command in commands(page)]
    assert len({tuple(command) for command in found if command[0] == "qarl"}) > 25
    with pytest.raises(Exception, match="--nope"):
        check_qarl(["train", "a.yaml", "--nope"], alone=False)
    with pytest.raises(AssertionError):
        check_qarl(["train", "a.yaml", "optim.nope=1"], alone=False)
