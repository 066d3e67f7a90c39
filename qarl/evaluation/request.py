"""Convert the options of `qarl eval` to an `evaluation` section. Imports no torch, so that errors appear at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qarl.checks.check_files import Unusable, look
from qarl.config import EvaluationConfig
from qarl.config.data import TEMPLATE_OPTION, template_arguments
from qarl.config.evaluation_presets import PRESETS, unknown_preset
from qarl.config.messages import Loc, shown, validated
from qarl.errors import UserError
from qarl.inference.target import Target
from qarl.utils.text import visible

DEFAULT_RESPONSE_LENGTH = 1024  # for presets, if neither the command nor the run sets it
DEFAULT_TRAINING_PROMPTS = 128


@dataclass(frozen=True)
class Request:
    """Options of the command line; None if not given. chat, system, template_kwargs: see `prompting`."""

    data: tuple[str, ...] = ()  # NAME or NAME=PATH
    samples: int | None = None
    pass_at: tuple[int, ...] | None = None
    temperature: float | None = None
    max_response_length: int | None = None
    max_prompts: int | None = None
    seed: int | None = None
    chat: bool | None = None
    system: str | None = None
    template_kwargs: Mapping[str, Any] | None = None


def evaluation_section(target: Target, request: Request) -> tuple[EvaluationConfig, list[str]]:
    """Build the `evaluation` section: from the request, then the run's own section, then the defaults.

    Returns:
        The section, and lines to show to the user.

    Raises:
        UserError: The request is invalid.
    """
    section: dict[str, Any] = target.run.evaluation.model_dump() if target.run else {}
    notes = []
    section["every"] = None
    if request.data:
        section["tasks"] = [_preset_task(text) for text in request.data]
        if section.get("max_response_length") is None:
            section["max_response_length"] = DEFAULT_RESPONSE_LENGTH
        section["stop"] = section.get("stop") or []
    elif target.run is None:
        raise UserError(f"--data: {target.name} is not a run and has no data of its own; give {', '.join(PRESETS)}")
    elif not section["tasks"]:
        limit = request.max_prompts or DEFAULT_TRAINING_PROMPTS
        own = target.run.model_dump()
        section["tasks"] = [
            {"name": "train", "data": own["data"], "reward": own["reward"]["functions"], "max_prompts": limit}
        ]
        notes.append(f"no --data and no evaluation.tasks in the run: using its training data, at most {limit} rows")
    if request.max_prompts is not None:
        for task in section["tasks"]:
            task["max_prompts"] = min(request.max_prompts, task.get("max_prompts") or request.max_prompts)
    greedy = request.temperature == 0
    samples = request.samples if request.samples is not None or not greedy else 1
    if samples is not None:
        section |= {"samples": samples, "pass_at": None}
    given = {
        "temperature": request.temperature,
        "max_response_length": request.max_response_length,
        "seed": request.seed,
        "pass_at": None if request.pass_at is None else list(request.pass_at),
    }
    section |= {key: value for key, value in given.items() if value is not None}
    return validated(EvaluationConfig, section, _option), notes


def prompting(target: Target, request: Request) -> dict[str, Any]:
    """Keys of `data` that override those of every task: those of the request, and with --data those of the run.

    A run's own tasks define their prompting themselves.

    Raises:
        UserError: A system message or template arguments are given without a chat template.
    """
    own = target.prompting if request.data else None
    found = {} if own is None else own.model_dump(include={"chat_template", "chat_template_kwargs", "system_prompt"})
    if request.chat is not None:
        found["chat_template"] = request.chat
    if request.system is not None:
        found["system_prompt"] = request.system
    if request.template_kwargs is not None:
        found["chat_template_kwargs"] = template_arguments(request.template_kwargs)
    if found.get("chat_template") is False:
        if request.system is not None:
            raise UserError("--system: is part of the chat template; leave it out, or give --chat")
        if request.template_kwargs:
            raise UserError(f"{TEMPLATE_OPTION}: belongs to the chat template; leave it out, or give --chat")
        found["system_prompt"] = None
        found.pop("chat_template_kwargs", None)  # `load_tasks` drops each task's own
    return found


def _option(loc: Loc) -> str:
    """Return the command-line option that sets a key of the section, for error messages."""
    names = {
        "pass_at": "--k",
        "samples": "--samples",
        "temperature": "--temperature",
        "seed": "--seed",
        "max_response_length": "--max-response-length",
    }
    return names.get(str(loc[0]), "command line") if loc else "command line"


def _preset_task(text: str) -> dict[str, Any]:
    name, equals, path = text.partition("=")
    place = f"--data {visible(shown(text, 120))}"
    if name not in PRESETS:
        raise UserError(f"{place}: {unknown_preset(name)}")
    if equals:
        try:
            if look(path)[1] == "missing":
                raise Unusable(f"no such file or directory below {Path.cwd()}; give an existing path")
        except Unusable as error:
            raise UserError(f"{place}: {error}") from None
    return {"preset": name, "path": path or None}
