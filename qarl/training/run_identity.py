"""Digests of a run's inputs, which must agree across ranks and stay unchanged when the run resumes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qarl.config import Config, ModelConfig, QuantConfig
from qarl.config.deepspeed import deepspeed_keys
from qarl.data import PromptStream
from qarl.distributed.ranks import Ranks
from qarl.distributed.together import require_same, same_files, together
from qarl.evaluation.tasks import LoadedTask
from qarl.inputs.paths import path_errors
from qarl.objectives.custom import Custom
from qarl.policy.load import load_model
from qarl.policy.load_config import load_generation_config, load_model_config
from qarl.policy.load_rows import in_turn, row_weights
from qarl.policy.model_identity import digest_of, model_digests, model_files
from qarl.policy.source import locate
from qarl.policy.stored_weights import StoredWeights
from qarl.rewards.fingerprint import reward_fingerprint
from qarl.storage.input_files import INIT, input_name
from qarl.storage.saved_state import Inputs
from qarl.weight_sync.snapshot import Manifest, TensorRecord, describe

SAME_FILES = "give every rank the same files"
READING_S = 3600.0  # seconds beyond `distributed.timeout_s` for one rank to read the model, e.g. from a slow disk

Described = dict[str, tuple[list[int], str, str]]  # tensor name -> shape, dtype, SHA-256


def input_digests(
    config: Config, tokenizer: PreTrainedTokenizerBase, calibration: Sequence[Sequence[int]] = ()
) -> Inputs:
    """Compute the digests of a run's inputs, except prompts and base weights.

    The digests of `model` cover the tokenizer, the stop tokens and `quant.init`. Those of `reward` are from
    `reward_fingerprint`. `objective` is the source of a custom objective. `Inputs.files` has values of config.json and
    generation_config.json.

    Args:
        config: Configuration of the run.
        tokenizer: Tokenizer of the model.
        calibration: Token ids that `quant.init` calibrates with; empty for rtn.

    Returns:
        The inputs, without `digests["model"]["weights"]`.

    Raises:
        UserError: A file cannot be read.
    """
    generation = load_generation_config(config.model)
    digests = {
        "model": model_digests(config.model, generation, tokenizer)
        | {INIT: digest_of([config.quant.init, calibration])},
        "reward": reward_fingerprint(config.reward.functions),
    }
    if isinstance(config.objective, Custom):
        digests["objective"] = config.objective.fingerprint()
    return Inputs(digests, model_files(load_model_config(config.model), generation))


def require_same_inputs(
    ranks: Ranks, config: Config, inputs: Inputs, stream: PromptStream, tasks: Sequence[LoadedTask]
) -> None:
    """Check that all ranks have the same inputs, except weights. A collective.

    Ranks on several machines read their own files. This check must pass before weights are read, because ranks with
    models of different shapes would wait for each other in different collectives. Weights are compared while they are
    read, by `shared_tensors_digest`.

    Args:
        ranks: All ranks of the run.
        config: Configuration of the run.
        inputs: This rank's result of `input_digests`.
        stream: This rank's prompts (token ids and columns).
        tasks: This rank's evaluation tasks, with their prompts and rewards.

    Raises:
        UserError: On all ranks; names the first input that differs.
    """
    if ranks.count == 1:
        return
    require_same(ranks, together(ranks, lambda: named_inputs(config, inputs, stream, tasks)), SAME_FILES)


def named_inputs(config: Config, inputs: Inputs, stream: PromptStream, tasks: Sequence[LoadedTask]) -> dict[str, Any]:
    """Return every input by the name that errors use. Causes precede effects: the chat template before the prompts."""
    files = {f"model.path: {file}: {key}": v for file, values in inputs.files.items() for key, v in values.items()}
    digests = {input_name(kind, part): v for kind, parts in inputs.digests.items() for part, v in parts.items()}
    evaluation = {f"evaluation.tasks: {task.name}": task.fingerprint for task in tasks}
    data = {
        "data: the prompts": stream.fingerprint,
        "data: the columns beside the prompts (answers)": stream.columns_fingerprint,
    }
    deepspeed = {}
    if config.distributed.engine == "deepspeed":
        deepspeed = {"distributed.config": digest_of(deepspeed_keys(config.distributed.config))}
    return {**files, **digests, **deepspeed, **data, **evaluation}


def tensors_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and bits, in the given order. About 1 GB/s per core."""
    tensors = dict(named)
    return _digest(tensors, _described(tensors, tensors.__getitem__))


def shared_tensors_digest(
    config: ModelConfig, shapes: Mapping[str, Sequence[int]], ranks: Ranks, quant: QuantConfig | None = None
) -> str:
    """Return `tensors_digest` of the model's weights, verified to be the same on all ranks. A collective.

    Among ranks that see the same files (`same_files`), only the first one hashes them. Every machine thus reads and
    hashes the model once, and no rank trains on bytes that were not hashed. Comparing names, sizes and times of files
    was rejected, because they prove nothing across machines.

    Args:
        config: The model section.
        shapes: Shape of every parameter, in the model's order.
        ranks: All ranks of the run.
        quant: The `quant` section of the run; see `load_model`.

    Raises:
        UserError: On all ranks, if weights differ between ranks or cannot be read.
    """
    stored = row_weights(config, ranks, quant)
    leaders = same_files(ranks, lambda: _weight_files(config, stored))
    hashes = leaders[ranks.rank] == ranks.rank
    if stored is None:  # a model that must be loaded as a whole
        own = in_turn(
            ranks, lambda: _described(shapes, dict(load_model(config).named_parameters()).__getitem__) if hashes else {}
        )
    else:
        own = together(ranks, lambda: _described(shapes, stored.read) if hashes else {}, READING_S)
    every = ranks.gather(own)
    found: list[Described] = [every[leader] for leader in leaders]
    odd = next((name for name in shapes if any(records[name] != found[0][name] for records in found)), "")
    digest = _digest(shapes, found[ranks.rank])
    require_same(ranks, {f"model.path: its weights{odd and f' ({odd})'}": digest}, SAME_FILES)
    return digest


def _weight_files(config: ModelConfig, weights: StoredWeights | None) -> list[Path]:
    """Return the files that weights are read from: all files if the model must be loaded as a whole."""
    source = locate(config)
    with path_errors(f"model.path: '{config.path}'"):
        if weights is not None:
            return sorted({stored.file for stored in weights.files.values()})
        if source.gguf_file is not None:
            return [source.gguf_path()]
        return [path for path in source.directory().iterdir() if path.is_file()]


def _described(names: Iterable[str], read: Callable[[str], Tensor]) -> Described:
    """Return shape, dtype and SHA-256 of tensors by name. Threads help, because hashing releases the GIL."""

    def record(name: str) -> tuple[str, tuple[list[int], str, str]]:
        found = describe(read(name))
        return name, (list(found.shape), found.dtype, found.sha256)

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        return dict(pool.map(record, names))


def _digest(names: Iterable[str], described: Described) -> str:
    """Return the digest over the tensors `names`, in that order."""
    records = ((name, *described[name]) for name in names)
    return Manifest(0, {name: TensorRecord(tuple(shape), *rest) for name, shape, *rest in records}).digest()
