"""Write masters as a compressed-tensors checkpoint, with one parameter in memory at a time."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from qarl_formats.weight import LowBitWeight
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qarl.config.quant import OF_TRAINING, scheme_of
from qarl.errors import UserError
from qarl.exporting.staging import staged
from qarl.inference.export_record import FORMAT_VERSION, RECORD, Prompting
from qarl.inference.masters import Masters
from qarl.inference.opening import require_codes, same_codes_expected
from qarl.inference.target import Target
from qarl.inputs.json import body_digest
from qarl.inputs.schema import FileDigest
from qarl.policy.device import DTYPES
from qarl.policy.load import load_tokenizer, saved_tokenizer_class
from qarl.storage.disk import disk_errors, require_free
from qarl.storage.model_directory import (
    DOCUMENT_BYTES,
    RECORD_BYTES,
    config_document,
    files_in,
    name_older_class,
    save_tokenizer,
)
from qarl.storage.shards import Shard, bf16_bytes, plan_shards, shard_index, stored_bytes
from qarl.storage.tensorfile import TensorFile, write_file
from qarl.types import ExportResult
from qarl.utils.versions import package_versions
from qarl.weight_sync.snapshot import Manifest, TensorRecord, describe, named_tensors


def export_checkpoint(
    target: Target,
    masters: Masters,
    out: Path,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int,
    card: str,
    unpacked: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ExportResult:
    """Write a checkpoint that transformers, vLLM and `resolve_target` read.

    `out` appears only after everything was written and read back and, for a run's own scheme, the digest was verified.

    Args:
        target: Determines the scheme.
        masters: Masters of the target.
        out: New directory.
        dtype: Dtype of unquantized tensors.
        max_shard_bytes: Maximum bytes of tensors per file.
        card: Contents of README.md.
        unpacked: Store int4 codes one per byte.
        progress: Called with (bytes written, bytes of all tensors).

    Raises:
        UserError: `out` is in use, the disk is full, the scheme does not fit a layer, or the codes are not the run's.
    """
    scheme = scheme_of(target.quant)
    masters.check(scheme, target.quant.ignore)
    specs = masters.specs(target.quant, dtype, unpacked)
    shards = plan_shards(specs, max_shard_bytes)
    total = stored_bytes(specs)
    run = target.run
    same_as_run = run is not None and same_codes_expected(target) and DTYPES[run.model.dtype] == dtype
    with staged(out) as directory:
        tokenizer = load_tokenizer(target.model)
        save_tokenizer(tokenizer, directory)
        name_older_class(tokenizer, directory, saved_tokenizer_class(target.model))
        tokenizer_files = {str(path.relative_to(directory)): FileDigest.of(path) for path in files_in(directory)}
        needed = total + RECORD_BYTES * sum(map(len, specs.values())) + DOCUMENT_BYTES
        require_free(out, needed, "the export", "free some space, or choose another OUT, on another disk")
        with disk_errors(out, needed, place="OUT"):
            parameters = masters.forms(target.quant, dtype)
            written = _write_tensors(directory, shards, parameters, unpacked, lambda done: progress(done, total))
            _read_back(directory, shards, written.stored, out)
            digest = Manifest(masters.version or 0, written.published).digest()
            if same_as_run:
                require_codes(target, masters, digest)
            documents = {
                "config.json": config_document(masters.config, dtype, scheme, target.quant.ignore, unpacked),
                "generation_config.json": json.loads(masters.generation.to_json_string()),
            }
            documents[RECORD] = _record(
                _provenance(target, masters, digest, same_as_run), written.stored, documents, tokenizer_files
            )
            if len(shards) > 1:
                documents["model.safetensors.index.json"] = shard_index(shards)
            for name, document in documents.items():
                write_file(directory / name, [json.dumps(document, indent=2).encode() + b"\n"])
            write_file(directory / "README.md", [card.encode()])
            files = {str(path.relative_to(directory)): path.stat().st_size for path in files_in(directory)}
    return ExportResult(out, files, total, bf16_bytes(masters.shapes), digest, same_as_run)


@dataclass
class _Written:
    """Records of tensors by name: as published, in snapshot order, and as stored in the files."""

    published: dict[str, TensorRecord]
    stored: dict[str, TensorRecord]


def _write_tensors(
    directory: Path,
    shards: list[Shard],
    parameters: Iterator[tuple[str, LowBitWeight | Tensor]],
    unpacked: bool,
    progress: Callable[[int], None],
) -> _Written:
    written = _Written({}, {})
    done = 0
    for shard in shards:
        layout = {name: (getattr(torch, spec.dtype), spec.shape) for name, spec in shard.specs.items()}
        with TensorFile(directory / shard.file, layout, {"format": "pt"}) as file:  # transformers requires the metadata
            for expected in shard.parameters:
                name, parameter = next(parameters)
                assert name == expected, (name, expected)
                for tensor_name, tensor in named_tensors(name, parameter, unpacked):
                    file.write(tensor_name, tensor)
                    written.stored[tensor_name] = describe(tensor)
                    done += tensor.nbytes
                for tensor_name, tensor in named_tensors(name, parameter):
                    known = None if unpacked else written.stored[tensor_name]
                    written.published[tensor_name] = known or describe(tensor)
                del parameter, tensor  # before the next parameter is read
                progress(done)
    return written


def _read_back(directory: Path, shards: list[Shard], records: dict[str, TensorRecord], out: Path) -> None:
    """Raise UserError unless safetensors reads back from the files what was written."""
    for shard in shards:
        try:
            with safe_open(directory / shard.file, framework="pt") as file:
                changed = [name for name in shard.specs if describe(file.get_tensor(name)) != records[name]]
        except SafetensorError as error:
            raise UserError(f"{out}: {shard.file} cannot be read back ({error}); check the disk") from error
        if changed:
            raise UserError(f"{out}: {changed[0]} came back from {shard.file} with other bytes; check the disk")


def _provenance(target: Target, masters: Masters, digest: str, same_as_run: bool) -> dict[str, Any]:
    """Return where the tensors come from."""
    return {
        "packages": package_versions(),
        "run": None if target.run_dir is None else target.run_dir.resolve().name,
        "step": target.step,
        "model": target.model.model_dump(include={"path", "gguf_file", "revision"}),
        "quant": target.quant.model_dump(exclude=OF_TRAINING),
        "policy_version": masters.version,
        "run_snapshot_sha256": masters.digest,
        "snapshot_sha256": digest,
        "codes_are_the_runs": same_as_run,
        "prompting": None if target.run is None else Prompting.of(target.run).model_dump(),
    }


def _record(
    provenance: Mapping[str, Any],
    tensors: Mapping[str, TensorRecord],
    documents: Mapping[str, dict[str, Any]],
    files: Mapping[str, FileDigest],
) -> dict[str, Any]:
    """Return the contents of qarl_export.json. tensors: Records of the stored tensors. files: Tokenizer files."""
    body = {
        "format_version": FORMAT_VERSION,
        **provenance,
        "config": documents["config.json"],
        "generation_config": documents["generation_config.json"],
        "files": {name: digest.model_dump() for name, digest in files.items()},
        "tensors": {name: asdict(record) for name, record in tensors.items()},
    }
    return body | {"sha256": body_digest(body)}
