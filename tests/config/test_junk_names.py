"""Any text in place of a path, a source or a name is either used or refused in one line."""

import os
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_settings import plain_settings

import qarl
from qarl.checks.check import check_inputs
from qarl.config.data import RESERVED_COLUMNS, RESERVED_TEMPLATE_ARGUMENTS, DataConfig, template_arguments
from qarl.config.source import read_source
from qarl.data.sources import load_rows
from qarl.errors import UserError
from qarl.evaluation.request import Request, evaluation_section
from qarl.inference.target import resolve_target

EXACT = [{"name": "exact"}]
JUNK = [
    *["/", "/..", ".", "../", "a//b", "--", "a/b/c/d", "~", "~nobody-here", "a\0b", "x" * 300, "a/" + "x" * 300, " "],
    *["with space", "a\nb", "https://huggingface.co/a/b", "a..b", "a--b", ".a/b", "ünï/cödé", "\u202e", "a/b@main"],
    *["*", "\ud800", "x.gguf", "package:", "package:/", "task:x", "reasoning-gym:", "/dev/zero", "/etc/passwd"],
    *["x.py:", "x.py:f", "a.jsonl/"],
]
UNUSABLE = [  # as a path of any kind
    *["~nosuchuser/x.jsonl", "./loop.jsonl", "./dangling.jsonl", "./file.jsonl/x.jsonl", "./pipe.jsonl", "/dev/null"],
    "./" + "a/" * 1500 + "../" * 500 + "x.jsonl",  # long when joined
]
TEXT = st.text(st.sampled_from("/.~-:@ \0\n\\ab1*%"), max_size=12)


def task(**fields: Any) -> dict[str, Any]:
    return {"evaluation": {"tasks": [fields]}}


# Key -> the sections that set it.
KEYS: dict[str, Callable[[str], dict[str, Any]]] = {
    "model.path": lambda v: {"model": {"path": v}},
    "model.revision": lambda v: {"model": {"path": "org/name", "revision": v}},
    "model.gguf_file": lambda v: {"model": {"path": "org/name", "gguf_file": v}},
    "data.source": lambda v: {"data": {"source": v}},
    "data.subset": lambda v: {"data": {"source": "org/name", "subset": v}},
    "reward.functions.0.name": lambda v: {"reward": {"functions": [{"name": v}]}},
    "objective.path": lambda v: {"objective": {"name": "custom", "path": v}},
    "checkpoint.resume": lambda v: {"checkpoint": {"resume": v}},
    "train.run_dir": lambda v: {"train": {"steps": 1, "run_dir": v}},
    "distributed.config": lambda v: {"distributed": {"engine": "deepspeed", "config": v}},
    "evaluation.tasks.0.path": lambda v: task(preset="gsm8k", path=v),
    "evaluation.tasks.0.reward.0.name": lambda v: task(
        name="t", data={"source": "task:arithmetic"}, reward=[{"name": v}]
    ),
}


def configured(sections: dict[str, Any]) -> None:
    given = read_source(plain_settings() | sections, ())
    check_inputs(given.config(), given.place, given.overrides)


def rows_of(source: str) -> None:
    """Load the rows of a source, unless it is on the hub or a whole disk."""
    try:
        config = DataConfig(source=source)
    except ValueError:  # tested by `configured`
        return
    if config.kind != "hub" and source.strip("/.~") and ".." not in source:
        load_rows(config)


JOBS: dict[str, Callable[[str], object]] = {
    **{key: lambda value, section=section: configured(section(value)) for key, section in KEYS.items()},
    "rows": rows_of,
    "TARGET": resolve_target,
    "export": qarl.export,
    "--data": lambda value: evaluation_section(resolve_target("org/name"), Request(data=(f"gsm8k={value}",))),
}


PATHS = ["data.source", "model.path", "checkpoint.resume", "reward.functions.0.name", "evaluation.tasks.0.path"]
PATHS += ["train.run_dir"]


def refused_if_wrong(job: str, value: str) -> bool:
    """Do the job; return whether it was refused, in a line that names the key."""
    try:
        JOBS[job](value)
    except UserError as error:
        for line in str(error).split("\n"):  # one for each fault
            assert line and not any(unicodedata.category(character) == "Cc" for character in line), (job, value, line)
            keys = (f"configuration: {job} = ", "configuration: model.path = ")
            assert job not in KEYS or line.startswith(keys), line
        return True
    return False


@pytest.mark.parametrize("job", JOBS)
def test_junk_is_used_or_refused_in_one_line(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for suffix in (".jsonl", ".py"):
        Path(f"loop{suffix}").symlink_to(f"loop{suffix}")
        Path(f"dangling{suffix}").symlink_to("nowhere")
        os.mkfifo(f"pipe{suffix}")
    Path("file.jsonl").write_text("{}\n")
    for value in JUNK:
        refused_if_wrong(job, value)
    for path in UNUSABLE if job in PATHS else ():
        assert refused_if_wrong(job, path.replace(".jsonl", ".py:f") if "reward" in job else path), path

    @settings(max_examples=5, deadline=None, derandomize=True)
    @given(TEXT)
    def any_text(value: str) -> None:
        refused_if_wrong(job, value)

    any_text()


# --- names that shadow others


def minimal(**data: Any) -> dict[str, Any]:
    return plain_settings(data=data)


def refused(given: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        read_source(given, ()).config()
    assert line in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(RESERVED_COLUMNS))
def test_columns_do_not_shadow_arguments_of_rewards(name):
    given = minimal(columns={name: "answer"})
    if name == "prompt":
        read_source(given, ()).config()
        return
    refused(given, f'data.columns.{name} = "answer": is an argument that every reward function is called with')
    task = {"name": "t", "data": given["data"], "reward": EXACT}
    refused({**minimal(), "evaluation": {"tasks": [task]}}, f"evaluation.tasks.0.data.columns.{name} = ")


def test_columns_do_not_shadow_options_of_a_users_reward():
    own = {"name": "own.py:f", "options": {"scale": 2}}
    text = "is an option of the reward function own.py:f too"
    given = minimal(columns={"scale": "answer"})
    refused({**given, "reward": {"functions": [*EXACT, own]}}, f'data.columns.scale = "answer": {text}')
    task = {"name": "t", "data": given["data"], "reward": [own]}
    refused({**minimal(), "evaluation": {"tasks": [task]}}, f'tasks.0.data.columns.scale = "answer": {text}')
    built_in = {"name": "exact", "options": {"column": "answer"}}
    read_source({**minimal(columns={"column": "answer"}), "reward": {"functions": [built_in]}}, ()).config()


@pytest.mark.parametrize("name", [*RESERVED_TEMPLATE_ARGUMENTS, "a-b", "if", "__class__"])
def test_arguments_of_the_template_do_not_shadow_its_own(name):
    for sections in (
        minimal(chat_template_kwargs={name: 1}),
        {**minimal(), "evaluation": {"tasks": [{"preset": "gsm8k", "chat_template_kwargs": {name: 1}}]}},
    ):
        refused(sections, f".chat_template_kwargs.{name} = 1: is ")
    with pytest.raises(UserError, match=r"^--chat-template-kwargs: "):
        template_arguments({name: 1})
