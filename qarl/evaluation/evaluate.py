"""`qarl eval`: run an evaluation and write its results directory."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qarl.config import EvaluationConfig
from qarl.config.quant import OF_TRAINING
from qarl.errors import memory_errors
from qarl.evaluation.directory import PLACE, ResultsDirectory
from qarl.evaluation.request import DEFAULT_RESPONSE_LENGTH
from qarl.evaluation.runner import Settings, evaluate
from qarl.evaluation.tasks import LoadedTask, TaskRewards, load_tasks, require_room
from qarl.inference.opening import context_of, open_policy
from qarl.inference.target import Target
from qarl.policy.load import load_tokenizer
from qarl.policy.load_config import load_architecture, load_model_config
from qarl.policy.model_identity import config_values, model_digests
from qarl.storage.disk import require_output
from qarl.storage.environment import command_line, describe_environment
from qarl.storage.saved_state import started_at
from qarl.terminal.noise import quiet_libraries, rewards_logged
from qarl.terminal.run_console import RunConsole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@memory_errors("lower --max-response-length, or take a larger machine; rerun the same command to resume")
def evaluate_target(
    target: Target,
    section: EvaluationConfig,
    own_data: bool,
    out: Path | None,
    device: str,
    notes: list[str],
    show: str = "rich",
    prompting: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], Path]:
    """Evaluate, or resume an interrupted evaluation. A KeyboardInterrupt keeps the finished completions.

    Args:
        target: The policy.
        section: What to evaluate.
        own_data: Whether the tasks are those of the run, so that its rollout section defines how a response ends.
        out: Results directory; default below the run, or ./eval.
        device: auto, cpu or cuda.
        notes: Lines to show to the user.
        show: rich, plain or none, as `logging.console`.
        prompting: Keys of `data` that override those of every task.

    Returns:
        The results and their directory.

    Raises:
        UserError: An input cannot be read, a prompt does not fit, or the directory holds another evaluation.
    """
    if out is not None:
        require_output(out, PLACE, folder=True)
    rollout = target.run.rollout if target.run else None
    ends = rollout if own_data else None  # defines how a response ends
    stop = tuple(ends.stop) if ends else ()
    length = ends.max_response_length if ends else DEFAULT_RESPONSE_LENGTH
    console = RunConsole(show)
    with console, quiet_libraries(console.warn):
        for note in notes:
            console.message(note)
        with console.phase("tokenizer and data"):
            tokenizer = load_tokenizer(target.model)
            tasks = _loaded(section, target, tokenizer, dict(prompting or {}), console.message)
        for task in tasks:
            if task.dropped:
                console.warn(f"{task.name}: dropped {task.dropped} prompts longer than data.max_prompt_length")
        settings = Settings.of(section, length, stop, frozenset())
        room, key = context_of(target), "--max-response-length"
        require_room(tasks, settings.max_response_length, room, "the context", key)
        identity = _identity(target, tokenizer, tasks, settings)
        path = out or _default_directory(target, tasks, identity)
        with ExitStack() as held:
            directory = held.enter_context(ResultsDirectory.open(path, identity))
            held.enter_context(rewards_logged(path / "rewards.log"))
            with console.phase("reward workers"):
                rewards = TaskRewards(tasks, target.run.reward if target.run else None, path / "rewards.log")
            held.callback(rewards.close)
            with console.phase("model"):
                sizes = rollout.model_copy(update={"kv_cache_tokens": None}) if rollout else None
                opened = open_policy(target, device=device, rollout=sizes)
            held.callback(opened.close)
            sampling = opened.sampling(
                settings.samples,
                settings.max_response_length,
                settings.truncation,
                stop=settings.stop,
                extra_stop_ids=tuple(ends.stop_token_ids) if ends else (),
                ignore_eos=ends is not None and ends.ignore_eos,
            )
            settings = replace(settings, stop_token_ids=sampling.stop_token_ids)
            late = {
                "stop_token_ids": sorted(sampling.stop_token_ids),
                "weights": opened.policy.current.manifest().digest(),
            }
            directory.begin(late, settings.samples)
            if directory.rows:
                console.message(f"resuming from {len(directory.rows)} completions in {path}")
            engine, version, rows = opened.engine, opened.policy.version, directory.rows
            try:
                summary = evaluate(engine, version, tasks, settings, rewards, rows, directory.append, console.phase)
            except KeyboardInterrupt:
                console.message(f"stopped with {len(rows)} completions in {path}; rerun the same command to resume")
                raise
            results = {
                "format_version": 1,
                "target": target.name,
                "step": target.step,
                "scheme": target.quant.scheme,
                "kv_cache_dtype": target.quant.kv_cache_dtype,
                "samples": settings.samples,
                "sampling": settings.describe(),
                **summary,
                "environment": describe_environment(settings.seed),
                "command": command_line(),
            }
            directory.finish(results)
    return results, path


def _identity(
    target: Target, tokenizer: PreTrainedTokenizerBase, tasks: list[LoadedTask], settings: Settings
) -> dict[str, Any]:
    """Everything that determines the results, except weights and stop tokens (known once the policy is loaded)."""
    sampling = settings.describe()
    del sampling["stop_token_ids"]
    quant = target.quant.model_dump(exclude=OF_TRAINING)
    return {
        "step": target.step,
        "model": {
            "config.json": config_values(load_model_config(target.model)),
            **model_digests(target.model, None, tokenizer),
        },
        "quant": quant,
        "sampling": sampling,
        "tasks": {task.name: task.fingerprint for task in tasks},
    }


def _default_directory(target: Target, tasks: list[LoadedTask], identity: dict[str, Any]) -> Path:
    """Default results directory: a readable name, unique per evaluation."""
    names = "-".join(task.name for task in tasks[:3]) + ("-more" if len(tasks) > 3 else "")
    names = names[:100]  # directory names are limited to 255 bytes
    mark = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:8]
    quant = target.quant.scheme + ("-kv-fp8" if target.quant.kv_cache_dtype == "fp8" else "")
    if target.run_dir is not None:
        return target.run_dir / "eval" / f"{target.step:06d}-{quant}-{names}-{mark}"
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", target.name).strip("-.")[-100:] or "model"
    return Path("eval") / f"{slug}-{quant}-{names}-{mark}"


def _loaded(
    section: EvaluationConfig,
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    prompting: dict[str, Any],
    say: Callable[[str], None],
) -> list[LoadedTask]:
    """Load the tasks. Without a chat template and without a run, prompts are plain text; `say` reports the choice."""
    shape = load_architecture(target.model)
    if target.prompting is None and not tokenizer.chat_template:
        prompting.setdefault("chat_template", False)
    if "chat_template" in prompting:
        say(f"prompts {'in the chat template' if prompting['chat_template'] else 'as plain text, without a template'}")
    vocabulary = shape.vocab_size if shape else None
    return load_tasks(section.tasks, tokenizer, vocabulary, prompting, started_at(target.checkpoint))
