"""The files of a model on this machine: in its directory, or downloaded from the hub into the cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from qarl.inputs.paths import path_errors
from qarl.inputs.tensors import INDEX, SINGLE, shard_names


@dataclass(frozen=True)
class ModelSource:
    """Where a model is: what `from_pretrained` takes as name, and the GGUF file inside it, if any. revision: of a hub
    name."""

    name: str
    gguf_file: str | None
    revision: str | None = None

    def file(self, name: str) -> Path | None:
        """One of its files, or None where it has none of that name.

        Offline, what the cache lacks counts as not there. Raises what huggingface_hub raises when it cannot tell.
        """
        directory = Path(self.name)
        with path_errors(self.name):
            if directory.is_dir():
                path = directory / name
                # A link to nowhere is there, and what reads it says so.
                return path if path.exists() or path.is_symlink() else None
        try:
            return Path(hf_hub_download(self.name, name, revision=self.revision))
        except LocalEntryNotFoundError:
            if constants.HF_HUB_OFFLINE:
                return None
            raise
        except EntryNotFoundError:
            return None

    def directory(self) -> Path:
        """The directory with its weights; a hub model's are downloaded. Raises what huggingface_hub raises."""
        directory = Path(self.name)
        if directory.is_dir():
            return directory
        found = self.file(SINGLE) or self.file(INDEX) or self.file("config.json")
        if found is None:
            return directory
        if found.name == INDEX:
            for shard in shard_names(found):
                self.file(shard)
        return found.parent
