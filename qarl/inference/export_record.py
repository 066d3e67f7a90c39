"""qarl_export.json: the contents of an exported directory, and how its run was prompted. Imports no torch.

Format 2:

    {"format_version": 2,
     "tensors": {NAME: {"shape": [...], "dtype": "torch.int32", "sha256": ...}},    as stored in the files
     "config": {...}, "generation_config": {...},    config.json and generation_config.json by value
     "files": {"tokenizer.json": {"bytes": ..., "sha256": ...}},    tokenizer and chat template
     "prompting": {...},    see `Prompting`; null if no run was exported
     "quant": {...},    the `quant` section, without keys that only matter in training
     ...,    provenance of the tensors: see `qarl.exporting.writer`
     "sha256": of everything above}

Format 1 has only the tensors, so only they are checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from qarl.config import Config
from qarl.errors import UserError
from qarl.inputs.files import NoSuchFile, Unreadable
from qarl.inputs.json import body_digest, flatten, read_json_object, short_json
from qarl.inputs.schema import FileDigest, Record, Sha256, checked
from qarl.storage.input_files import TOKENIZER_FILES

RECORD = "qarl_export.json"
RECORD_BYTES = 2**30  # limit; a mixture with 100,000 tensors needs a fiftieth of it
FORMAT_VERSION = 2
OPTION = "--no-verify-digests"
SKIP = f"pass {OPTION} to skip this check"
SKIP_IN_TRAINING = "set model.verify_digests: false to skip this check"


class TensorDigest(Record):
    """Digest of a stored tensor. dtype: As torch prints it. sha256: Over the bytes in row-major order."""

    shape: list[int]
    dtype: str
    sha256: Sha256


class Prompting(Record):
    """Prompt format and stop conditions of a run; keys of its `data` and `rollout` sections."""

    chat_template: bool
    system_prompt: str | None = None
    prompt_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field({})
    stop: list[str] = Field([])
    stop_token_ids: list[int] = Field([])

    @classmethod
    def of(cls, run: Config) -> Prompting:
        """Return the prompting of a run."""
        data = run.data.model_dump(
            include={"chat_template", "chat_template_kwargs", "system_prompt", "prompt_template"}
        )
        return cls(**data, stop=list(run.rollout.stop), stop_token_ids=list(run.rollout.stop_token_ids))

    def label(self) -> str:
        """Return one line: how prompts look and what ends a response."""
        how = "in the chat template" if self.chat_template else "as plain text, without a chat template"
        system = "" if self.system_prompt is None else f", with the system message {short_json(self.system_prompt)}"
        if self.chat_template_kwargs:
            how += f" with {json.dumps(self.chat_template_kwargs)}"
        ends = [*map(short_json, self.stop), *(f"token {token}" for token in self.stop_token_ids)]
        return f"prompts {how}{system}" + (f"; responses also end at {', '.join(ends)}" if ends else "")


class _Tensors(Record):
    """Format 1."""

    format_version: int
    tensors: dict[str, TensorDigest]


class _Whole(_Tensors):
    """Format 2."""

    config: dict[str, Any]
    generation_config: dict[str, Any]
    files: dict[str, FileDigest]
    prompting: Prompting | None
    quant: dict[str, Any] = Field({})
    sha256: Sha256


class ExportRecord:
    """qarl_export.json of a directory.

    Attributes:
        path: The file.
        tensors: Digests of the stored tensors by name.
        prompting: How the run was prompted; None if there was no run, and for format 1.
        kv_cache_dtype: `quant.kv_cache_dtype` of the run; None for format 1.
    """

    def __init__(self, path: Path, contents: Mapping[str, Any], skip: str) -> None:
        """contents: The parsed file. skip: How to skip the check, for messages."""
        self.path, self._contents, self._skip = path, contents, skip
        version = contents.get("format_version")
        self._whole = None if version == 1 else checked(_Whole, contents, str(path))
        self.tensors = (self._whole or checked(_Tensors, contents, str(path))).tensors
        self.prompting = None if self._whole is None else self._whole.prompting
        self.kv_cache_dtype = None if self._whole is None else self._whole.quant.get("kv_cache_dtype")

    def check_documents(self) -> None:
        """Compare config.json, generation_config.json and the tokenizer's files with the record.

        Raises:
            UserError: The record, a document or a file was changed, is missing, or was added.
        """
        if self._whole is None:
            return
        directory = self.path.parent
        if body_digest(self._contents) != self._whole.sha256:
            raise UserError(f"{self.path}: was changed after the export; export it again, or {self._skip}")
        for name, recorded in (
            ("config.json", self._whole.config),
            ("generation_config.json", self._whole.generation_config),
        ):
            found = _document(directory / name, self._skip)
            was, now = flatten(recorded), flatten(found)
            for key in dict.fromkeys((*was, *now)):
                if key not in was or key not in now or json.dumps(was[key]) != json.dumps(now[key]):  # 1 is not 1.0
                    raise UserError(
                        f"{directory / name}: {key} is {_shown(now, key)}, and was {_shown(was, key)} in the export; "
                        f"restore the file, export it again, or {self._skip}"
                    )
        self._check_files(directory, self._whole.files)

    def _check_files(self, directory: Path, files: Mapping[str, FileDigest]) -> None:
        for name, recorded in files.items():
            try:
                found = FileDigest.of(directory / name)
            except NoSuchFile as error:
                raise UserError(
                    f"{directory / name}: is missing; restore it, export it again, or {self._skip}"
                ) from error
            if found != recorded:
                raise UserError(
                    f"{directory / name}: is not the file that was exported (another SHA-256); restore it, export it "
                    f"again, or {self._skip}"
                )
        templates = (f"additional_chat_templates/{path.name}" for path in directory.glob("additional_chat_templates/*"))
        for name in (*TOKENIZER_FILES, *sorted(templates)):
            if name not in files and (directory / name).exists():
                raise UserError(
                    f"{directory / name}: was added after the export; remove it, export it again, or {self._skip}"
                )

    def check_names(self, stored: Iterable[str]) -> None:
        """Raise UserError unless `stored` has exactly the names of the recorded tensors."""
        stored = set(stored)
        for name in self.tensors:
            if name not in stored:
                raise UserError(
                    f"{self.path.parent}: {name} is in {RECORD} and in no .safetensors file; export it again, or "
                    f"{self._skip}"
                )
        for name in sorted(stored - self.tensors.keys()):
            raise UserError(
                f"{self.path.parent}: {name} is not in {RECORD}: it was added after the export; export it again, or "
                f"{self._skip}"
            )

    def check_tensor(self, file: Path, name: str, found: TensorDigest) -> None:
        """Raise UserError unless `found`, the digest of tensor `name` in `file`, is the recorded one."""
        if found != self.tensors[name]:
            raise UserError(
                f"{file}: {name} is not the tensor that was exported (another SHA-256); export it again, or "
                f"{self._skip}"
            )


def read_export_record(directory: Path, skip: str = SKIP) -> ExportRecord | None:
    """Read the record of a directory; None if qarl did not export it.

    skip: How to skip the check, for messages. Raises UserError if the record cannot be read.
    """
    path = directory / RECORD
    try:
        contents = read_json_object(path, limit=RECORD_BYTES, nonfinite=True, big_integers=True)
        return ExportRecord(path, contents, skip)
    except NoSuchFile:
        return None
    except Unreadable as error:
        raise UserError(f"{error}; export it again, or remove the file: without it nothing is checked") from error


def _document(path: Path, skip: str) -> dict[str, Any]:
    try:
        return read_json_object(path, nonfinite=True, big_integers=True)
    except NoSuchFile as error:
        raise UserError(f"{path}: is missing; restore it, export it again, or {skip}") from error


def _shown(values: Mapping[str, Any], key: str) -> str:
    return short_json(values[key]) if key in values else "absent"
