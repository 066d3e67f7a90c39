"""Checks beyond the schema: the files exist, and the scheme and the lengths fit the model."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from qarl_formats.scheme import check_shape, is_ignored

from qarl.checks.check_files import Unusable, file_faults, look, task_faults
from qarl.checks.check_ranks import several_ranks_faults
from qarl.config.architecture import (
    Architecture,
    LinearShape,
    UnknownFamily,
    read_config_json,
    read_gguf,
    unserved_heads,
)
from qarl.config.config import Config, mixture_faults
from qarl.config.load import key_place
from qarl.config.messages import Loc, capped, fault_line
from qarl.config.model import PREFIX, ModelConfig, UnusableModel, package_gguf
from qarl.config.overrides import override_keys
from qarl.config.quant import scheme_of
from qarl.config.weight_files import check_weights
from qarl.errors import UserError
from qarl.inputs.section import Fault
from qarl.utils.packed_linears import fusion_fault
from qarl.utils.text import visible


@dataclass(frozen=True)
class Inspection:
    """Result of inspecting a model.

    Attributes:
        architecture: The model's architecture; None if it cannot be read on this machine.
        note: Why there is no architecture.
    """

    architecture: Architecture | None
    note: str = ""


def check_inputs(config: Config, file: str, overrides: list[str]) -> Inspection:
    """Check files, group size and context without loading anything.

    Args:
        config: The configuration. Relative paths are relative to the working directory.
        file: As given to `load_config`.
        overrides: As given to `load_config`.

    Raises:
        UserError: One line per fault.
    """
    faults = [*file_faults(config), *task_faults(config)]
    inspection = Inspection(None)
    try:
        inspection = check_model(config.model)
    except UnusableModel as error:
        faults.append(Fault(("model", error.key), error.value, error.text))
    if inspection.architecture is not None:
        faults += _model_faults(config, inspection.architecture)
    _refuse(faults, file, overrides)
    return inspection


def check_run(config: Config, ranks: int, gpus: int | None, file: str, overrides: list[str]) -> Inspection:
    """Check everything that does not need torch: inputs, ranks, and the headers of weight files.

    Args:
        config, file, overrides: See `check_inputs`.
        ranks: Number of ranks.
        gpus: See `several_ranks_faults`.

    Raises:
        UserError: One line per fault.
    """
    inspection = check_inputs(config, file, overrides)
    _refuse(list(several_ranks_faults(config, ranks, gpus)), file, overrides)
    if inspection.architecture is not None:
        check_weights(config.model, inspection.architecture)
    return inspection


def _refuse(faults: list[Fault], file: str, overrides: list[str]) -> None:
    if faults:
        keys, place = override_keys(overrides), visible(file)
        lines = [f"{key_place(f.key, place, keys)}: {fault_line(f.key, f.value, f.text)}" for f in faults]
        raise UserError("\n".join(capped(lines, place)))


def check_model(model: ModelConfig) -> Inspection:
    """Check that a model exists, and read its architecture if it is on this machine. Raises UnusableModel."""
    if model.path.startswith(PREFIX):
        return _read(model, package_gguf(model))
    path, found = _look("path", model.path)
    if found == "directory":
        key, name = ("gguf_file", model.gguf_file) if model.gguf_file is not None else ("path", "config.json")
        file, what = _look(key, str(path / name))
        if what != "file":
            if model.gguf_file is not None:
                raise UnusableModel("gguf_file", model.gguf_file, f"no such file in {path}")
            adapter = (path / "adapter_config.json").is_file()
            fix = (
                "is a LoRA adapter; merge it into its base model (merge_and_unload of peft), and give the merged model"
                if adapter
                else "holds no config.json; give a model directory, or model.gguf_file"
            )
            raise UnusableModel("path", model.path, fix)
        return _read(model, file)
    if found != "missing":
        raise UnusableModel("path", model.path, "is a file; give its directory (and model.gguf_file for a GGUF)")
    if model.path.startswith((".", "/", "~")) or model.path.count("/") > 1:
        what = "no such directory; give a model directory, a hub name, or package:NAME"
        raise UnusableModel("path", model.path, what)
    # Imported lazily: the import takes 0.2 seconds, and local models do not need it.
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model.path, model.gguf_file or "config.json", revision=model.revision)
    except HFValidationError as error:
        text = f"is not a directory or a hub name ({' '.join(str(error).split())})"
        raise UnusableModel("path", model.path, text) from None
    except ValueError:  # an absolute path, `..`, a drive
        text = "is not the name of a file in a hub repository; give one such as model.Q4_0.gguf"
        raise UnusableModel("gguf_file", str(model.gguf_file), text) from None
    if not isinstance(cached, str):
        return Inspection(
            None,
            f"{model.path} is not in the local Hugging Face cache: the estimate, and the checks of group size and "
            f"context, need the model's config.json locally (hf download {model.path} config.json)",
        )
    return _read(model, Path(cached))


def _look(key: str, text: str) -> tuple[Path, str]:
    try:
        return look(text)
    except Unusable as error:
        raise UnusableModel(key, text, str(error)) from None


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
            yield config.fault("quant.group_size", str(error))
            break  # layers repeat, so the first fault is enough
    names = {"lm_head", *(linear.name for linear in linears)}
    for index, entry in enumerate(quant.ignore):
        if not entry.startswith("re:") and entry not in names:
            yield Fault(
                ("quant", "ignore", index), entry, f"is not a Linear layer of the model, such as {linears[0].name}"
            )
    if architecture.mixture is None:
        yield from mixture_faults(config)
    kernels = config.model.device == "cuda" and quant.kernels == "auto" and config.model.dtype != "float32"
    if kernels and (reason := unserved_heads(architecture.head_dim)):
        yield config.fault("model.path", reason)
    if config.rollout.engine == "vllm":
        if fault := architecture.vllm_fault:
            yield config.fault("model.path", f"{fault}; use engine native")
        yield from _fused_faults(config, linears)
        yield from _tensor_parallel_faults(config, architecture)
        yield from _expert_faults(config, architecture)
    for index, token in enumerate(config.rollout.stop_token_ids):
        if token >= architecture.vocab_size:
            text = f"the model's vocabulary has {architecture.vocab_size:,} tokens; must be less than that"
            yield Fault(("rollout", "stop_token_ids", index), token, text)
            break
    limit = architecture.context_length
    if limit is None:
        return
    context, pool = min(limit, config.model.max_length or limit), config.rollout.kv_cache_tokens
    if config.rollout.engine == "vllm" and pool is not None and pool < context:
        text = f"vLLM requires space for the whole context; must be {context} or more, or lower model.max_length"
        yield config.fault("rollout.kv_cache_tokens", text)
    if config.model.max_length is not None and config.model.max_length > limit:
        yield config.fault("model.max_length", f"the model's context is {limit} tokens; lower it")
    if config.data.max_prompt_length >= limit:
        yield config.fault(
            "data.max_prompt_length", f"the model's context is {limit} tokens, response included; lower it"
        )
    elif config.max_sequence_length > limit:
        yield config.fault(
            "rollout.max_response_length",
            f"with data.max_prompt_length = {config.data.max_prompt_length} it exceeds the model's context of {limit} "
            f"tokens; must be {limit - config.data.max_prompt_length} or less, or shorten the prompts",
        )
    yield from _evaluation_faults(config, context)


def _fused_faults(config: Config, linears: list[LinearShape]) -> Iterator[Fault]:
    """Layers that vLLM fuses but that `quant` treats differently; see `fusion_fault`."""
    rows = {linear.name: linear.out_features for linear in linears}
    fault = fusion_fault(scheme_of(config.quant), config.quant.ignore, rows)
    if fault is not None:
        key, reason = fault
        fix = "ignore both or neither" if key == "ignore" else "use another scheme"
        yield config.fault(f"quant.{key}", f"{reason}; {fix}, or set rollout.engine to native")


def _tensor_parallel_faults(config: Config, architecture: Architecture) -> Iterator[Fault]:
    """Heads and scale groups that `rollout.vllm.tensor_parallel` GPUs cannot split evenly."""
    gpus, scheme = config.rollout.vllm.tensor_parallel, scheme_of(config.quant)
    for what, heads in (
        ("attention heads", architecture.num_heads),
        ("key and value heads", architecture.num_kv_heads),
    ):
        if heads % gpus:
            text = f"the model has {heads} {what}; must be a divisor of {heads}"
            yield config.fault("rollout.vllm.tensor_parallel", text)
            return
    for name, out_features, in_features in architecture.linears() if gpus > 1 else ():
        by_columns = name.endswith(("o_proj", "down_proj"))
        features = in_features if by_columns else out_features
        unit = 1
        if not is_ignored(name, config.quant.ignore):  # a scale group or a packed word must not be split
            words = 16 if by_columns else 1 if scheme.symmetric else 8
            unit = math.lcm(words, scheme.row_block, (scheme.group_size or 1) if by_columns else 1)
        if features % (gpus * unit):
            text = f"{name} has {features} {'input' if by_columns else 'output'} features in blocks of {unit}"
            yield config.fault("rollout.vllm.tensor_parallel", f"{text}, which cannot be split evenly; use fewer GPUs")
            return  # layers repeat, so the first fault is enough


def _expert_faults(config: Config, architecture: Architecture) -> Iterator[Fault]:
    """Settings that vLLM does not support for a mixture of experts."""
    if architecture.mixture is None:
        return
    gpus = config.rollout.vllm.tensor_parallel
    if gpus > 1:
        yield config.fault("rollout.vllm.tensor_parallel", "experts are not split over GPUs; must be 1")
    if config.vllm_numerics == "fast" and (reason := config.experts_unserved(config.model.device)):
        yield config.fault("rollout.numerics", f"{reason}; must be exact")


def _evaluation_faults(config: Config, context: int) -> Iterator[Fault]:
    """Evaluation lengths that exceed the context. Prompt lengths of presets are only known after loading them."""
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
