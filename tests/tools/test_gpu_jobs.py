"""Every command in `benchmarks/gpu_jobs.yaml` is one that its tool takes."""

import argparse
import importlib
import itertools
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_jobs import Job, read_jobs

from qarl.config import Config
from qarl.config.load import make_config

ROOT = Path(__file__).parents[2]
JOBS = read_jobs(ROOT / "benchmarks/gpu_jobs.yaml")


def commands(job: Job) -> Iterator[list[str]]:
    """The words of each simple command of a job."""
    for line in job.command.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        for operator, words in itertools.groupby(lexer, key=lambda word: word != "" and set(word) <= set("|&;")):
            if not operator:
                yield list(words)


def calls(*program: str) -> Iterator[tuple[Job, list[str]]]:
    """Each job's calls of a program: the words after its name."""
    for job in JOBS:
        yield from ((job, words[len(program) :]) for words in commands(job) if words[: len(program)] == list(program))


TOOLS = sorted({word[6:-3] for job in JOBS for words in commands(job) for word in words if word.startswith("tools/")})
CALLS = [pytest.param(tool, words, id=job.name) for tool in TOOLS for job, words in calls("python", f"tools/{tool}.py")]


@pytest.mark.parametrize(("tool", "arguments"), CALLS)
def test_a_job_has_arguments_that_its_tool_accepts(tool: str, arguments: list[str]) -> None:
    module = importlib.import_module(tool)
    parsed = module.parse(arguments)
    if tool == "bench_step":
        step_configurations(parsed)


def step_configurations(options: argparse.Namespace) -> None:
    """The configuration of each case of bench_step is a valid one, overrides too."""
    from bench_step import step_sections
    from model_sizes import shape_of

    options.device = "cuda"
    for scheme, shape in itertools.product(list(options.scheme), options.shape):
        options.scheme, model = scheme, shape_of(shape, options.layers, options.vocabulary)
        if "step" in options.part:
            sections = step_sections(options, model, Path("model"), Path("place"), options.engine or "vllm")
            found = make_config(sections, "step", options.set)
            assert isinstance(found, Config) and found.responses_per_step == options.prompts * options.responses
        if "trl" in options.part:
            from trl_peer import grpo_arguments

            assert grpo_arguments(options, Path("place"), "vllm")["use_vllm"]


def test_qarl_takes_its_studies(tmp_path: Path, monkeypatch) -> None:
    from qarl.comparison import study

    monkeypatch.setattr(study, "check_inputs", lambda *_: None)  # of a model that the job makes
    members = {}
    for job, (given, *words) in calls("python", "-m", "qarl.cli", "compare"):
        overrides = [word for word in words if "=" in word]
        rest = words[: len(words) - len(overrides)]
        options = dict(zip(rest[::2], rest[1::2], strict=True))
        assert set(options) - {"--only"} == {"--profile", "--seeds", "--jobs", "--out"}
        file, seeds = str(ROOT / given), [int(seed) for seed in options["--seeds"].split(",")]
        only = options["--only"].split(",") if "--only" in options else None
        found = study.plan_study(study.load_study(file), file, overrides, tmp_path, options["--profile"], only, seeds)
        members[job.name] = len(found)
    assert list(members) == ["exactness", "exactness-w4a16", "mixture", "staleness", "evidence", "evidence-trl"]
    assert list(members.values()) == [15, 15, 27, 60, 4, 2]


def test_files_exist_and_a_case_ends_before_its_job_does() -> None:
    """So that a case which hangs leaves a record, and those after it have their time."""
    words = [word for job in JOBS for word in job.command.split() if word.startswith(("tools/", "tests/"))]
    assert all((ROOT / word).exists() for word in words)
    for job, words in calls("python", "tools/bench_step.py"):
        given = dict(itertools.pairwise(words))
        assert float(given.get("--timeout", 0)) <= job.seconds, job.name
