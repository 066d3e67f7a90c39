"""Options and arguments of every command, walked from the command line's own definition."""

from __future__ import annotations

import inspect
import random
from dataclasses import dataclass
from functools import cache
from typing import get_type_hints

import yaml

from fuzzing.base import COMPARE, EVALUATE, RUN, Base, lay_out
from fuzzing.case import Case, argument
from fuzzing.paths import PATHS, make_traps
from fuzzing.values import FLOATS_OF_OPTIONS, INTEGERS, TEXTS, shown

# Command lines that work, in a directory with all parts of the base; that of `compare` without a model trains nothing.
WORKING: dict[str, tuple[list[str], ...]] = {
    "check": (["check", "tiny.yaml"],),
    "schema": (["schema"],),
    "runs": (["runs", "runs"],),
    "report": (["report", str(RUN)],),
    "generate": (
        ["generate", "model", "--prompt", "2 + 2 =", "--max-new-tokens", "4"],
        ["generate", str(RUN), "--prompt", "2 + 2 =", "--max-new-tokens", "4"],
    ),
    "eval": (
        [
            "eval",
            "model",
            "--data",
            "minerva=rows.jsonl",
            "--samples",
            "2",
            "--max-response-length",
            "6",
            "--max-prompts",
            "2",
        ],
        ["eval", str(RUN), "--samples", "2", "--max-prompts", "2"],
        EVALUATE,
    ),
    "export": (["export", str(RUN), "out"],),
    "quantize": (["quantize", "model", "out", "--scheme", "w4a16", "--group-size", "32"],),
    "compare": (
        list(COMPARE),
        ["compare", "nomodel.yaml", "--seeds", "0,1", "--out", "out"],
        ["compare", str(RUN), str(RUN), "--out", "out"],
    ),
    "diagnose": (["diagnose", str(RUN), "--no-gradients"],),
    "train": (["train", "tiny.yaml"],),
    "verify-exact": (
        ["verify-exact", "model", "--tokens", "8", "--longest", "8"],
        ["verify-exact", str(RUN), "--tokens", "8", "--longest", "8"],
    ),
}
WEIGHTS = {
    "check": 3,
    "schema": 1,
    "runs": 4,
    "report": 4,
    "generate": 8,
    "eval": 8,
    "export": 6,
    "quantize": 8,
    "compare": 10,
    "diagnose": 4,
    "train": 1,
    "verify-exact": 6,
}
SLOW = {("export", "verify"), ("verify-exact", "engine")}  # start vLLM where it is installed, which takes a minute
LISTS = (
    "bf16",
    "bf16,bf16",
    ",",
    "w4a16,",
    " bf16 , fp8",
    "0,1,2",
    "0," * 5_000 + "0",
    "9" * 400,
    "0,-1",
    "1-3",
    "a,b",
    "1e3",
    "0x1",
    "²,1",
)


@dataclass(frozen=True)
class Option:
    """One option of a command. kind: the names of its Python types, such as `list[pathlib.Path] | None`."""

    name: str
    spellings: tuple[str, ...]
    flag: bool
    kind: str


@cache
def options() -> dict[str, tuple[Option, ...]]:
    """Those of each command, as the command line defines them."""
    import typer

    from qarl.cli import app

    found = {}
    for name, command in typer.main.get_command(app).commands.items():
        hints = get_type_hints(inspect.unwrap(command.callback))
        found[name] = tuple(
            Option(p.name, (*p.opts, *p.secondary_opts), p.is_flag, str(hints.get(p.name)))
            for p in command.params
            if p.param_type_name == "option" and p.name in hints and (name, p.name) not in SLOW
        )
    return found


def mutate_options(rng: random.Random, base: Base, case: Case) -> None:
    """One command line with one or two arguments that are wrong, odd, absent, repeated or unknown."""
    make_traps(case.cwd)
    lay_out(base, case, "config", "data", "reward", "run", "model", "export", "results")
    (case.cwd / "nomodel.yaml").write_text(yaml.safe_dump(base.config(model={"path": "./nosuch"})))
    command = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    argv = list(rng.choice(WORKING[command]))
    done = []
    for _ in range(rng.choice((1, 1, 1, 2))):
        what, argv = _mutated(rng, command, argv)
        done.append(what)
    case.mutation = "options: " + "; ".join(done)
    case.argv = [argument(text) for text in argv]


def _mutated(rng: random.Random, command: str, argv: list[str]) -> tuple[str, list[str]]:
    choices = options()[command]
    kind = rng.choice(
        ("option", "option", "option", "option", "option", "positional", "unknown", "missing", "extra", "bare")
    )
    if kind == "option" and choices:
        option = choices[int(rng.random() * len(choices))]
        name = option.spellings[int(rng.random() * len(option.spellings))]
        if option.flag:
            return f"{name} given", [*argv, name]
        value = _value(rng, option)
        if name in argv and rng.random() < 0.7:
            place = argv.index(name)
            argv = [*argv[:place], *argv[place + 2 :]]
        how = [f"{name}={value}"] if rng.random() < 0.7 else [name, value]
        return f"{name} = {shown(value)}", [*argv, *how]
    if kind == "bare" and choices:
        name = choices[int(rng.random() * len(choices))].spellings[0]
        return f"{name} without a value", [*argv, name]
    if kind == "missing" and len(argv) > 1:
        place = 1 + int(rng.random() * (len(argv) - 1))
        return f"{shown(argv[place])} left out", [*argv[:place], *argv[place + 1 :]]
    if kind == "extra":
        value = _text(rng)
        return f"{shown(value)} added", [*argv, value]
    if kind == "unknown":
        name = rng.choice(
            (
                "--nosuch",
                "-x",
                "--",
                "--step=1",
                "--json",
                "--version",
                "--help",
                "--see\x1b[31md",
                "--\u202e",
                "--seed",
            )
        )
        return f"{shown(name)} added", [*argv, name]
    if len(argv) > 1 and not argv[1].startswith("-"):
        value = _target(rng)
        return f"first argument {shown(value)}", [argv[0], value, *argv[2:]]
    value = _text(rng)
    return f"{shown(value)} added", [*argv, value]


def _value(rng: random.Random, option: Option) -> str:
    if rng.random() < 0.15:
        return _text(rng)
    if "int" in option.kind:
        return rng.choice(INTEGERS)
    if "float" in option.kind:
        return rng.choice(FLOATS_OF_OPTIONS)
    if "Path" in option.kind or option.name in ("model", "offline"):
        return rng.choice((*PATHS, "model", str(RUN), "export", "rows.jsonl", f"{RUN}/config.yaml"))
    if option.name == "data":
        source = rng.choice((*PATHS, "rows.jsonl", "model"))
        return rng.choice(("gsm8k", "nosuch", "", "=", rng.choice(TEXTS))) + rng.choice(
            ("", "=", f"={source}", f"={source}")
        )
    if option.name in ("schemes", "learners", "seeds", "only", "k"):
        return rng.choice((*LISTS, *INTEGERS[:8]))
    if option.name == "max_shard_size":
        return rng.choice(
            (*INTEGERS, "0GB", "-5GB", "1e3MB", "nanGB", "infGB", "5 GB", "9" * 400 + "GB", "1B", "1KB", "²GB", "5XB")
        )
    return _text(rng)


def _text(rng: random.Random) -> str:
    return rng.choice((*TEXTS, *PATHS, *INTEGERS))


def _target(rng: random.Random) -> str:
    return rng.choice(
        (
            *PATHS,
            *TEXTS,
            "model",
            str(RUN),
            f"{RUN}/checkpoints/000002",
            f"{RUN}/checkpoints/latest",
            f"{RUN}/checkpoints",
            "export",
            "rows.jsonl",
            "tiny.yaml",
        )
    )
