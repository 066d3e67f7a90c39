"""A snapshot as a checkpoint directory that a sampler starts from: the published tensors, no masters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from qarl_formats.scheme import TensorSpec
from transformers import PreTrainedTokenizerBase

from qarl.storage.disk import disk_errors, require_free
from qarl.storage.model_directory import DOCUMENT_BYTES, RECORD_BYTES, config_document, save_tokenizer
from qarl.storage.shards import Shard, plan_shards, shard_index, stored_bytes
from qarl.storage.tensorfile import TensorFile, write_file
from qarl.weight_sync.snapshot import ModelLayout, Snapshot

MAX_SHARD_BYTES = 4 * 10**9


def write_snapshot_checkpoint(
    directory: Path, snapshot: Snapshot, layout: ModelLayout, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write a snapshot for vLLM and transformers to load, bit for bit. A tied output layer is left out.

    Args:
        directory: Created here.
        snapshot: Tensors on any device, copied one at a time.
        layout: Layout of the model.
        tokenizer: Tokenizer to save beside the tensors.

    Raises:
        UserError: The directory exists, or the disk is full or cannot be written. Nothing is left behind.
    """
    shards = plan_shards(_specs(snapshot), MAX_SHARD_BYTES)
    total = sum(stored_bytes({shard.file: shard.specs}) for shard in shards)
    needed = total + RECORD_BYTES * len(snapshot.tensors) + DOCUMENT_BYTES
    fix = "free some space, or choose another train.run_dir, on another disk"
    require_free(directory, needed, "the sampler's checkpoint", fix)
    documents = {"config.json": config_document(layout.config, layout.dtype, layout.scheme, layout.ignore)}
    if layout.generation is not None:
        documents["generation_config.json"] = json.loads(layout.generation.to_json_string())
    if len(shards) > 1:
        documents["model.safetensors.index.json"] = shard_index(shards)
    with disk_errors(directory, needed, "train.run_dir"):
        directory.mkdir(parents=True)
        try:
            save_tokenizer(tokenizer, directory)
            for shard in shards:
                _write_shard(directory, shard, snapshot)
            for name, document in documents.items():
                write_file(directory / name, [json.dumps(document, indent=2).encode() + b"\n"])
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise


def _specs(snapshot: Snapshot) -> dict[str, dict[str, TensorSpec]]:
    """Group the tensors by module, so that codes and scales of a weight are in the same file."""
    specs: dict[str, dict[str, TensorSpec]] = {}
    for name, tensor in snapshot.tensors.items():
        spec = TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        specs.setdefault(name.rpartition(".")[0], {})[name] = spec
    return specs


def _write_shard(directory: Path, shard: Shard, snapshot: Snapshot) -> None:
    layout = {name: (snapshot.tensors[name].dtype, spec.shape) for name, spec in shard.specs.items()}
    # transformers requires the metadata. No fsync: a sampler reads the file at once, and a new start writes it again.
    with TensorFile(directory / shard.file, layout, {"format": "pt"}, durable=False) as file:
        for name in shard.specs:
            file.write(name, snapshot.tensors[name])
