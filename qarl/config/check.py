"""What a valid configuration demands of the world: files that exist, and a model that the scheme and lengths fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from qarl_formats.scheme import check_shape, is_ignored

from qarl.config.architecture import Architecture, UnknownFamily, read_config_json, read_gguf
from qarl.config.base import Fault
from qarl.config.config import Config
from qarl.config.data import LOCAL_SUFFIXES, DataConfig
from qarl.config.load import key_place
from qarl.config.messages import Loc, fault_line
from qarl.config.model import ModelConfig
from qarl.config.overrides import override_keys
from qarl.config.package_model import PREFIX, UnusableModel, package_gguf
from qarl.config.quant import scheme_of
from qarl.config.reward import RewardFunction
from qarl.errors import UserError

# Projections that vLLM keeps in one weight, by the name of that.
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
         "up_proj": "gate_up_proj"}  # fmt: skip


@dataclass(frozen=True)
class Inspection:
    """architecture: of the model, where it can be read on this machine; otherwise None, and `note` says why."""

    architecture: Architecture | None
    note: str = ""


def check_inputs(config: Config, file: str, overrides: list[str]) -> Inspection:
    """Check files, group size and context without loading anything. file, overrides: as given to `load_config`.

    Relative paths count from the working directory. Raises UserError with one line per fault.
    """
    faults = list(_file_faults(config))
    inspection = Inspection(None)
    try:
        inspection = _inspect(config.model)
    except UnusableModel as error:
        faults.append(Fault(("model", error.key), error.value, error.text))
    if inspection.architecture is not None:
        faults += _model_faults(config, inspection.architecture)
    if faults:
        keys = override_keys(overrides)
        raise UserError(
            "\n".join(f"{key_place(f.key, file, keys)}: {fault_line(f.key, f.value, f.text)}" for f in faults)
        )
    return inspection


def check_model(model: ModelConfig) -> Inspection:
    """Check that a model is there, and read its architecture where it is on this machine.

    Raises UserError with one line.
    """
    try:
        return _inspect(model)
    except UnusableModel as error:
        raise UserError(f"model.{error.key}: '{error.value}': {error.text}") from error


def _file_faults(config: Config) -> Iterator[Fault]:
    yield from _source_faults(("data", "source"), config.data)
    yield from _reward_faults(("reward", "functions"), config.reward.functions)
    for index, task in enumerate(config.evaluation.tasks):
        key = ("evaluation", "tasks", index)
        yield from _source_faults((*key, "path") if task.preset else (*key, "data", "source"), task.dataset)
        yield from _reward_faults((*key, "reward"), task.reward)
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not Path(resume).expanduser().is_dir():
        yield Fault(("checkpoint", "resume"), resume, "no such checkpoint directory; give auto, never or its path")


def _source_faults(key: Loc, data: DataConfig) -> Iterator[Fault]:
    source, path = data.source, Path(data.source).expanduser()
    suffixes = ", ".join(LOCAL_SUFFIXES)
    if data.kind == "local" and not path.exists():
        yield Fault(key, source, f"no such file or directory below {Path.cwd()}; give an existing path")
    elif data.kind in ("local", "hub") and path.is_file() and path.suffix.lower() not in LOCAL_SUFFIXES:
        yield Fault(key, source, f"unknown type of file; must be one of {suffixes}")
    elif (
        data.kind == "local" and path.is_dir() and not any(f.suffix.lower() in LOCAL_SUFFIXES for f in path.rglob("*"))
    ):
        yield Fault(key, source, f"the directory holds none of {suffixes}; give one that does")


def _reward_faults(key: Loc, functions: list[RewardFunction]) -> Iterator[Fault]:
    for index, function in enumerate(functions):
        if function.file is not None and not Path(function.file).expanduser().is_file():
            text = f"no such file below {Path.cwd()}; give an existing file.py:function"
            yield Fault((*key, index, "name"), function.name, text)


def _inspect(model: ModelConfig) -> Inspection:
    path = Path(model.path).expanduser()
    if model.path.startswith(PREFIX):
        return _read(model, package_gguf(model))
    if path.is_dir():
        name = model.gguf_file or "config.json"
        if not (path / name).is_file():
            if model.gguf_file is not None:
                raise UnusableModel("gguf_file", model.gguf_file, f"no such file in {path}")
            raise UnusableModel("path", model.path, "holds no config.json; give a model directory, or model.gguf_file")
        return _read(model, path / name)
    if path.exists():
        raise UnusableModel("path", model.path, "is a file; give its directory (and model.gguf_file for a GGUF)")
    if model.path.startswith((".", "/", "~")) or model.path.count("/") > 1:
        what = "no such directory; give a model directory, a hub name, or package:NAME"
        raise UnusableModel("path", model.path, what)
    # Imported here: it costs a fifth of a second that local models need not pay.
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model.path, model.gguf_file or "config.json", revision=model.revision)
    except HFValidationError as error:
        raise UnusableModel("path", model.path, f"is no hub name ({' '.join(str(error).split())})") from None
    if not isinstance(cached, str):
        return Inspection(
            None,
            f"{model.path} is not in the local Hugging Face cache: the estimate, and the checks of group size and "
            f"context, need the model's config.json locally (hf download {model.path} config.json)",
        )
    return _read(model, Path(cached))


def _read(model: ModelConfig, path: Path) -> Inspection:
    try:
        return Inspection(read_gguf(path) if path.suffix == ".gguf" else read_config_json(path))
    except UnknownFamily as error:
        return Inspection(None, f"no estimate: {path.name} {error}")
    except ValueError as error:
        raise UnusableModel("path", model.path, f"{path.name} {error}") from None


def _model_faults(config: Config, architecture: Architecture) -> Iterator[Fault]:
    quant = config.quant
    scheme = scheme_of(quant)
    linears = architecture.linears()
    for name, out_features, in_features in linears:
        if is_ignored(name, quant.ignore):
            continue
        try:
            check_shape(scheme, name, out_features, in_features)
        except ValueError as error:
            yield Fault(("quant", "group_size"), quant.group_size, str(error))
            break  # the layers repeat: the first one says it
    names = {"lm_head", *(linear.name for linear in linears)}
    for index, entry in enumerate(quant.ignore):
        if not entry.startswith("re:") and entry not in names:
            yield Fault(
                ("quant", "ignore", index), entry, f"names no Linear layer of the model; such as {linears[0].name}"
            )
    if config.rollout.engine == "vllm":
        yield from _fused_faults(config, [linear.name for linear in linears])
    limit = architecture.context_length
    if limit is None:
        return
    if config.model.max_length is not None and config.model.max_length > limit:
        yield Fault(
            ("model", "max_length"), config.model.max_length, f"the model's context is {limit} tokens; lower it"
        )
    if config.data.max_prompt_length >= limit:
        key = ("data", "max_prompt_length")
        yield Fault(
            key, config.data.max_prompt_length, f"the model's context is {limit} tokens, response included; lower it"
        )
    elif config.max_sequence_length > limit:
        yield Fault(
            ("rollout", "max_response_length"),
            config.rollout.max_response_length,
            f"with data.max_prompt_length = {config.data.max_prompt_length} it exceeds the model's context of {limit} "
            f"tokens; must be {limit - config.data.max_prompt_length} or less, or shorten the prompts",
        )
    yield from _evaluation_faults(config, min(limit, config.model.max_length or limit))


def _fused_faults(config: Config, linears: list[str]) -> Iterator[Fault]:
    """vLLM multiplies q, k and v at once, and gate and up: such layers are quantized together, or none of them is."""
    ignore = config.quant.ignore
    if config.quant.scheme == "bf16":
        return
    groups: dict[str, list[str]] = {}
    for name in linears:
        block, _, projection = name.rpartition(".")
        if projection in FUSED:
            groups.setdefault(f"{block}.{FUSED[projection]}", []).append(name)
    for names in groups.values():
        ignored = [name for name in names if is_ignored(name, ignore)]
        if 0 < len(ignored) < len(names):
            other = next(name for name in names if name not in ignored)
            text = f"rollout.engine vllm fuses {ignored[0]}, which it names, with {other}; name both or neither"
            yield Fault(("quant", "ignore"), ignore, text)
            return  # the layers repeat


def _evaluation_faults(config: Config, context: int) -> Iterator[Fault]:
    """Lengths that cannot fit; how long the prompts of a preset are, loading them tells."""
    length = config.eval_response_length
    for index, task in enumerate(config.evaluation.tasks):
        prompt = 1 if task.data is None else task.data.max_prompt_length
        if prompt + length <= context:
            continue
        if task.data is None or config.evaluation.max_response_length is not None:
            key: Loc = ("evaluation", "max_response_length")
            of = "prompts" if task.data is None else f"data.max_prompt_length = {prompt}"
            value, what = length, f"with the {of} of task {task.name} it exceeds"
        else:
            key = ("evaluation", "tasks", index, "data", "max_prompt_length")
            value, what = prompt, f"with rollout.max_response_length = {length} it exceeds"
        yield Fault(key, value, f"{what} the context of {context} tokens; lower it")
