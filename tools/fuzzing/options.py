"""Options and arguments of every command, walked from the command line's own definition."""

import shlex
from functools import cache
from pathlib import Path

import typer
import yaml
from fuzzing.base import COMPARE, EVALUATE, GENERATE, QUANTIZE, RUN, config, lay_out
from fuzzing.case import Case
from fuzzing.values import argument, chance, floats, integers, listed, make_traps, paths, pick, shown, texts, weighted
from hypothesis.strategies import DrawFn, sampled_from
from typer.core import TyperOption as Option

# Command lines that work, in a directory with all parts of the base; that of `compare` without a model trains nothing.
WORKING: dict[str, tuple[str, ...]] = {
    "check": ("check tiny.yaml",),
    "schema": ("schema",),
    "runs": ("runs runs",),
    "report": (f"report {RUN}",),
    "generate": (GENERATE.format("model"), GENERATE.format(RUN)),
    "eval": (
        "eval model --data minerva=rows.jsonl --samples 2 --max-response-length 6 --max-prompts 2",
        f"eval {RUN} --samples 2 --max-prompts 2",
        EVALUATE,
    ),
    "export": (f"export {RUN} out",),
    "quantize": (QUANTIZE,),
    "compare": (COMPARE, "compare nomodel.yaml --seeds 0,1 --out out", f"compare {RUN} {RUN} --out out"),
    "diagnose": (f"diagnose {RUN} --no-gradients",),
    "train": ("train tiny.yaml",),
    "sft": ("sft tiny.yaml reward={} data.response=answer",),
    "distill": ("distill tiny.yaml objective.teacher.path=model",),
    "verify-exact": ("verify-exact model --tokens 8 --longest 8", f"verify-exact {RUN} --tokens 8 --longest 8"),
}
RARE = {"check": 3, "schema": 1, "runs": 4, "report": 4, "diagnose": 4, "train": 1, "sft": 1, "distill": 1}
SLOW = {("export", "verify"), ("verify-exact", "engine")}  # start vLLM where it is installed, which takes a minute
KINDS = {"option": 5, "positional": 1, "missing": 1, "bare": 1, "extra": 2}
odd = sampled_from(
    listed("bf16,bf16  ,  w4a16,  0,1,2  0,-1  1-3  a,b  1e3  0x1  ²,1  1_0  0GB  -5GB  nanGB  ²GB  5XB")
)
unknown = sampled_from(listed("--nosuch  -x  --  --step=1  --json  --version  --help  --see\x1b[31md  --\u202e"))
checkpoints = [f"{RUN}{part}" for part in ("", "/checkpoints", "/checkpoints/000002", "/checkpoints/latest")]
places = paths | sampled_from([*checkpoints, "model", "export", "rows.jsonl", "tiny.yaml", f"{RUN}/config.yaml"])
anything = texts | places | integers | floats | odd


@cache
def options() -> dict[str, list[Option]]:
    """Those of each command, as the command line defines them."""
    from qarl.cli import app

    commands = typer.main.get_command(app).commands
    return {
        name: [p for p in command.params if p.param_type_name == "option" and (name, p.name) not in SLOW]
        for name, command in commands.items()
    }


def mutate_options(draw: DrawFn, base: Path, case: Case) -> None:
    """One command line with one or two arguments that are wrong, odd, absent, repeated or unknown."""
    make_traps(case.cwd)
    lay_out(base, case)
    (case.cwd / "nomodel.yaml").write_text(yaml.safe_dump(config(model={"path": "./nosuch"})))
    command = weighted(draw, dict.fromkeys(WORKING, 8) | RARE)
    argv = shlex.split(pick(draw, WORKING[command]))
    done = []
    for _ in range(pick(draw, (1, 1, 1, 2))):
        what, argv = _mutated(draw, options()[command], argv)
        done.append(what)
    case.mutation = "options: " + "; ".join(done)
    case.argv = [argument(text) for text in argv]


def _mutated(draw: DrawFn, choices: list[Option], argv: list[str]) -> tuple[str, list[str]]:
    kind = weighted(draw, KINDS)
    if kind in ("option", "bare") and choices:
        option = pick(draw, choices)
        name = pick(draw, (*option.opts, *option.secondary_opts))
        if kind == "bare" or option.is_flag:
            return f"{name} alone", [*argv, name]
        value = draw(anything)
        return f"{name} = {shown(value)}", [*argv, *([f"{name}={value}"] if chance(draw, 70) else [name, value])]
    if kind == "missing" and len(argv) > 1:
        place = pick(draw, range(1, len(argv)))
        return f"{shown(argv[place])} left out", [*argv[:place], *argv[place + 1 :]]
    if kind == "positional" and len(argv) > 1 and not argv[1].startswith("-"):
        value = draw(anything)
        return f"first argument {shown(value)}", [argv[0], value, *argv[2:]]
    value = draw(unknown | anything)
    return f"{shown(value)} added", [*argv, value]
