"""A snapshot as a checkpoint directory, from which a sampler starts: the published tensors themselves, no masters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from qarl_formats.compressed import TensorSpec
from transformers import PreTrainedTokenizerBase

from qarl.errors import UserError
from qarl.storage.disk import disk_errors, free_bytes
from qarl.storage.model_directory import DOCUMENT_BYTES, RECORD_BYTES, config_document, save_tokenizer
from qarl.storage.shards import Shard, plan_shards, shard_index, stored_bytes
from qarl.storage.tensorfile import TensorFile, write_file
from qarl.weight_sync.layout import ModelLayout
from qarl.weight_sync.snapshot import Snapshot

MAX_SHARD_BYTES = 4 * 10**9


def write_snapshot_checkpoint(
    directory: Path,
    snapshot: Snapshot,
    layout: ModelLayout,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    place: str = "train.run_dir",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Write `snapshot` to the new directory `directory`, for vLLM and transformers to load. Returns bytes of tensors.

    Tensors stand under their own names and bit for bit, copied from their device one at a time; a tied output layer is
    not among them. layout: of the snapshot's model. max_shard_bytes: of tensors, per file. place: the key that says
    where to write, for errors.
    progress: called with (bytes written, bytes of all tensors).
    Raises UserError: the directory exists, no space, the disk refuses; then nothing stays.
    """
    shards = plan_shards(_specs(snapshot), max_shard_bytes)
    total = sum(stored_bytes({shard.file: shard.specs}) for shard in shards)
    needed = total + RECORD_BYTES * len(snapshot.tensors) + DOCUMENT_BYTES
    if (free := free_bytes(directory)) < needed:
        raise UserError(
            f"{directory}: no space for the sampler's checkpoint ({needed:,} bytes needed, {free:,} free); "
            f"free some space, or choose another {place}, on another disk"
        )
    documents = {"config.json": config_document(layout.config, layout.dtype, layout.scheme, layout.ignore)}
    if layout.generation is not None:
        documents["generation_config.json"] = json.loads(layout.generation.to_json_string())
    if len(shards) > 1:
        documents["model.safetensors.index.json"] = shard_index(shards)
    with disk_errors(directory, needed, place):
        directory.mkdir(parents=True)
        try:
            save_tokenizer(tokenizer, directory)
            _write_shards(directory, shards, snapshot, lambda done: progress(done, total))
            for name, document in documents.items():
                write_file(directory / name, [json.dumps(document, indent=2).encode() + b"\n"])
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
    return total


def _specs(snapshot: Snapshot) -> dict[str, dict[str, TensorSpec]]:
    """Parameter name -> its tensors, so that codes and scales of a weight come to stand in the same file."""
    specs: dict[str, dict[str, TensorSpec]] = {}
    for name, tensor in snapshot.tensors.items():
        module, _, suffix = name.rpartition(".")
        weight = snapshot.weights.get(module)
        parameter = f"{module}.weight" if weight is not None and suffix in weight.tensors else name
        spec = TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        specs.setdefault(parameter, {})[name] = spec
    return specs


def _write_shards(directory: Path, shards: list[Shard], snapshot: Snapshot, progress: Callable[[int], None]) -> None:
    done = 0
    for shard in shards:
        layout = {name: (snapshot.tensors[name].dtype, spec.shape) for name, spec in shard.specs.items()}
        # transformers demands the metadata. A sampler reads the file while the system has it in memory.
        with TensorFile(directory / shard.file, layout, {"format": "pt"}, durable=False) as file:
            for name in shard.specs:
                file.write(name, snapshot.tensors[name])
                done += snapshot.tensors[name].nbytes
                progress(done)
