"""Every command that the documentation shows is one: `qarl` parses it, make has it, the script has its options."""

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
    """The lines of blocks that begin like a command."""
    found = [line for line in shell_lines(page) if re.match(r"qarl |make |\S*python ", line)]
    return [words(line) for line in found]


def mentioned(page: Path) -> list[list[str]]:
    """Commands in the text, which need not be whole."""
    return [words(span) for span in spans(page) if span.startswith(("qarl ", "make ")) and "..." not in span]


def check_qarl(arguments: list[str], whole: bool = True) -> None:
    """whole: all that the command needs is there."""
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    context = group.make_context("qarl", list(arguments), resilient_parsing=True)
    if arguments[0].startswith("--"):
        assert any(arguments[0] in parameter.opts for parameter in group.params), arguments
        return
    name, command, rest = group.resolve_command(context, list(arguments))
    assert command is not None and name is not None
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {argument for argument in rest if argument.startswith("--")} <= {*options, "--help"}, arguments
    if whole:
        command.make_context(name, list(rest), parent=context).close()
    for argument in rest:
        if OVERRIDE.fullmatch(argument):
            assert re.sub(r"\.\d+\b", "", argument.partition("=")[0]) in known_keys(), argument


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_command_is_one(page: Path):
    for program, *arguments in commands(page):
        if program == "qarl":
            check_qarl(arguments)
        elif program == "make":
            check_make(arguments)
        elif arguments[0].startswith(("tools/", "examples/")):
            check_script(*arguments)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_command_that_the_text_mentions_is_one(page: Path):
    for program, *arguments in mentioned(page):
        if program == "qarl":
            check_qarl(arguments, whole=False)
        else:
            check_make(arguments)


def check_make(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for argument in arguments:
        wanted = rf"^{argument.partition('=')[0]} \?=" if "=" in argument else rf"^{argument}:"
        assert re.search(wanted, makefile, re.MULTILINE), argument


def check_script(name: str, *arguments: str) -> None:
    """The script is there, and its options stand in it."""
    text = (ROOT / name).read_text() + (ROOT / "examples/example_model.py").read_text()
    for option in (argument for argument in arguments if argument.startswith("--")):
        shared = option.removeprefix("--").replace("-", "_")  # an option of the harness, by its name
        assert any(part in text for part in (f'"{option}"', f"{shared}=", f'"{shared}":')), f"{name} {option}"


def test_commands_are_found_at_all():
    found = [command for page in PAGES for command in (*commands(page), *mentioned(page))]
    assert len({tuple(command) for command in found if command[0] == "qarl"}) > 25
    with pytest.raises(AssertionError, match="--nope"):
        check_qarl(["train", "a.yaml", "--nope"])
    with pytest.raises(AssertionError):
        check_qarl(["train", "a.yaml", "optim.nope=1"])
    with pytest.raises(Exception, match="config"):
        check_qarl(["train"])
