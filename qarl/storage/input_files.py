"""Digests of the files that a configuration names, computed without torch.

A run records these digests at its start (`inputs.files` in environment.json). `qarl compare` computes them again before
it reuses a finished run, because equal configurations may name files that were edited in between.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from qarl.config import Config
from qarl.config.data import DataConfig
from qarl.config.evaluation import EvalTask
from qarl.config.model import PREFIX, ModelConfig, package_gguf
from qarl.config.quant import PROMPTS, PYTHON_DOCS
from qarl.data.files import split_files
from qarl.data.sources import is_local
from qarl.data.tasks import generate
from qarl.inputs.files import Unreadable, file_sha256, sha256_once
from qarl.inputs.json import read_json_object
from qarl.inputs.paths import path_errors, user_path
from qarl.inputs.tensors import INDEX, SINGLE, shard_names
from qarl.objectives.custom import Custom
from qarl.rewards.fingerprint import reward_fingerprint
from qarl.utils.versions import version_of

INIT = "init"  # part of a run's `model` inputs: `quant.init` and its calibration text
UNKNOWN = "unknown"  # the identity of something on the hub that is not in the local cache

_REMEMBERED = 2**20  # bytes; larger files are hashed once per process, unless their size or time changes
# Files that change tokens or prompts. transformers reads each of them if it is there.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "vocab.json", "vocab.txt", "merges.txt", "tekken.json"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)
_MODEL_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_GENERATED_ROWS = 100  # enough to notice another version of a task generator


def present_inputs(
    config: Config, kinds: Sequence[str] = ("reward", "objective", "files")
) -> dict[str, dict[str, str]]:
    """Return the inputs that can be identified without torch, in the layout of `inputs` in environment.json.

    Args:
        config: A checked configuration.
        kinds: Kinds to compute. `files` reads the model's weights, at about 1 GB/s per core.

    Returns:
        `reward`: see `reward_fingerprint`. `objective`: the source of a user's own objective, if there is one.
        `files`: see `input_files`.

    Raises:
        UserError: A file cannot be read.
    """
    found: dict[str, dict[str, str]] = {}
    if "reward" in kinds:
        found["reward"] = reward_fingerprint(config.reward.functions)
    if "objective" in kinds and isinstance(config.objective, Custom):
        found["objective"] = config.objective.fingerprint()
    if "files" in kinds:
        found["files"] = input_files(config)
    return found


def input_files(config: Config) -> dict[str, str]:
    """Identify the files that a configuration names, except the sources of its reward and objective.

    Args:
        config: A checked configuration.

    Returns:
        Identity by configuration key, with the file name if the key names a directory: `model.path: config.json`,
        `data.source`, `evaluation.tasks.NAME: data.source`. The identity of a file is the SHA-256 of its bytes; of a
        hub name, the commit in the local cache (`unknown` if it is not cached); of a generated task, a digest of its
        first rows, or the version of reasoning-gym.

    Raises:
        UserError: A file cannot be read.
    """
    digests = model_files(config.model) | dict(_data("data.source", config.data))
    for task in config.evaluation.tasks:
        digests |= _task(task)
    if isinstance(config.distributed.config, str):
        digests["distributed.config"] = _identity(user_path(config.distributed.config, "distributed.config"))
    source = config.quant.calibration.source
    if config.quant.init != "rtn" and source not in (PYTHON_DOCS, PROMPTS):
        digests["quant.calibration.source"] = _identity(user_path(source, "quant.calibration.source"))
    return digests


def model_files(model: ModelConfig, weights: bool = True) -> dict[str, str]:
    """Return the model's part of `input_files`.

    Args:
        model: The model section.
        weights: Whether to include safetensors files. A run omits them because its checkpoint has its own weights.

    Raises:
        UserError: A file cannot be read.
    """
    files = dict(_model_files(model, weights))
    with ThreadPoolExecutor(8) as pool:  # hashing releases the GIL
        return dict(zip(files, pool.map(_identity, files.values()), strict=True))


def _model_files(model: ModelConfig, weights: bool) -> Iterator[tuple[str, Path | str]]:
    """Yield (name, file or identity) for the files that the loaders of weights and tokenizer read."""
    place = "model.path"
    if model.path.startswith(PREFIX):
        file = package_gguf(model)
        yield f"{place}: {file.name}", file
        return
    directory = user_path(model.path, place)
    with path_errors(f"{place}: '{model.path}'"):
        if not directory.is_dir():
            yield f"{place}: commit", hub_commit("models", model.path, model.revision)
            return
        names = [name for name in _MODEL_FILES if (directory / name).exists()]
        if model.trust_remote_code:
            names += sorted(path.name for path in directory.glob("*.py"))
        if model.gguf_file is not None:
            names.append(model.gguf_file)
        elif weights and (directory / SINGLE).exists():
            names.append(SINGLE)
        elif weights and (directory / INDEX).exists():
            names.append(INDEX)
            with suppress(Unreadable):  # loading it later reports the error
                names += [name for name in shard_names(directory / INDEX) if (directory / name).exists()]
    yield from ((f"{place}: {name}", directory / name) for name in names)


def _task(task: EvalTask) -> Iterator[tuple[str, str]]:
    """The data of an evaluation task, and the sources of its reward functions."""
    key = f"evaluation.tasks.{task.name}"
    yield from _data(f"{key}: data.source", task.dataset)
    own = [function for function in task.functions if not function.builtin]
    if own:
        digests = reward_fingerprint(own)
        yield from ((f"{key}: the source of `{name}`", digest) for name, digest in digests.items())


def _data(key: str, data: DataConfig) -> Iterator[tuple[str, str]]:
    if data.kind == "task":
        rows = generate(data.source, data.task, _GENERATED_ROWS)
        yield key, hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    elif data.kind == "reasoning_gym":
        yield key, f"reasoning-gym {version_of('reasoning-gym') or UNKNOWN}"
    elif not is_local(data):
        yield f"{key}: commit", hub_commit("datasets", data.source, None)
    else:
        path = user_path(data.source, key)
        with path_errors(f"{key}: {path}"):
            if path.is_file():
                yield key, _identity(path)
                return
            files = split_files(path, data.split)
        yield from ((f"{key}: {file.relative_to(path)}", _identity(file)) for file in files)


def hub_commit(kind: str, name: str, revision: str | None) -> str:
    """Return the commit of a hub repository in the local cache, or `unknown`. Makes no network request.

    Args:
        kind: `models` or `datasets`.
        name: Repository name.
        revision: Branch, tag or commit; None is the branch main.
    """
    from huggingface_hub import constants  # takes 0.2 s to import; not needed for local files

    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    file = Path(constants.HF_HUB_CACHE) / f"{kind}--{name.replace('/', '--')}" / "refs" / (revision or "main")
    try:
        commit = file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return UNKNOWN
    return commit if _COMMIT.fullmatch(commit) else UNKNOWN


def _identity(file: Path | str) -> str:
    """Return the SHA-256 of a file; a string is already an identity."""
    if isinstance(file, str):
        return file
    with path_errors(str(file)):
        small = file.stat().st_size < _REMEMBERED
    return file_sha256(file)[1] if small else sha256_once(file)


def changed_names(then: Mapping[str, Any], now: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the user-facing names of inputs that changed.

    Args:
        then: `inputs` of an environment.json.
        now: Result of `present_inputs`. Kinds that only one of the two has and `unknown` identities are skipped.
    """
    names = []
    for kind, here in now.items():
        there = then.get(kind)
        if not isinstance(there, dict):
            continue
        for part in {**there, **here}:
            pair = there.get(part), here.get(part)
            if pair[0] != pair[1] and UNKNOWN not in pair:
                names.append(input_name(kind, part))
    return names


def changed_while_training(path: Path, now: Mapping[str, Any]) -> list[str]:
    """Return the inputs that changed between starts of a run with the permission of `checkpoint.allow_changed`.

    Leaves out evaluation tasks, because a changed task is refused unless nothing was evaluated yet.

    Args:
        path: The environment.json of the run's previous start. If it is missing or damaged, the result is empty.
        now: `inputs` of this start.
    """
    try:
        then = read_json_object(path).get("inputs")
    except Unreadable:
        return []
    if not isinstance(then, dict):
        return []
    before = then.get("changed")
    known = [name for name in before if isinstance(name, str)] if isinstance(before, list) else []
    kinds = {kind: now[kind] for kind in ("reward", "objective", "files") if kind in now}
    names = [name for name in changed_names(then, kinds) if not name.startswith("evaluation.")]
    return list(dict.fromkeys([*known, *names]))


def input_name(kind: str, part: str) -> str:
    """Name one part of a run's inputs in a message. kind, part: keys of `inputs` in environment.json."""
    if kind == "files":
        return part
    if kind == "model" and part == INIT:
        return "quant.init: the method or its calibration text"
    if kind == "model":
        return f"model.path: its {part}"
    if (kind, part) == ("objective", "teacher"):
        return "objective.teacher: its weights"
    if kind in ("reward", "objective"):
        return f"{'reward.functions' if kind == 'reward' else 'objective.path'}: the source of `{part}`"
    return kind
