"""Loads the rows of `data.source`: a task generator, a local file or directory, or a hub dataset."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qarl.config.data import is_generator
from qarl.data import files, tasks
from qarl.data.values import Row
from qarl.errors import UserError
from qarl.inputs.paths import path_errors, shown_path, user_path
from qarl.utils.text import visible

if TYPE_CHECKING:
    from qarl.config.data import DataConfig


def load_rows(config: DataConfig) -> list[Row]:
    """Load the first `config.max_rows` rows of `config.source`, in the source's order.

    `task:NAME` and `reasoning-gym:NAME` are generated. A path that exists, or looks like a path, is read from disk.
    Anything else is a hub dataset. Every row has the same keys; a key that some JSON rows lack is None there.

    Raises:
        UserError: The task or an option is unknown, a file is missing or unreadable (the message gives the line), the
            split is missing, or there are no rows.
    """
    source = config.source
    if is_generator(source):
        rows = tasks.generate(source, config.task, config.max_rows)
    elif is_local(config):
        if config.subset is not None:
            raise UserError(f"data.subset: only hub datasets have subsets, got `{config.subset}` for `{source}`")
        path = user_path(source, "data.source")
        with path_errors(f"data.source: {path}"):
            there, is_file = path.exists(), path.is_file()
        if not there:
            raise UserError(
                f"data.source: no file or directory `{shown_path(source)}` (working directory {Path.cwd()})"
            )
        if not is_file and not path.is_dir():
            raise UserError(f"data.source: {path}: neither a file nor a directory")
        if is_file and config.split != "train":
            raise UserError(f"data.split: a single file has only the split `train`, got `{config.split}`")
        rows = files.read_file(path) if is_file else files.read_directory(path, config.split)
        rows = rows[: config.max_rows]
    else:
        rows = files.plain_rows(_load_from_hub(config), f"data.source: `{source}`")
    if not rows:
        raise UserError(f"data.source: `{source}` (split `{config.split}`) has no rows")
    return rows


def is_local(config: DataConfig) -> bool:
    """Whether the source is read from disk: it looks like a path, or exists although it looks like a hub name."""
    path = user_path(config.source, "data.source")
    with path_errors(f"data.source: {path}"):
        return config.kind == "local" or path.exists()


def _load_from_hub(config: DataConfig) -> list[Row]:
    """Load one split of a dataset of the Hugging Face hub or its local cache.

    The split may use the library's slice syntax, as in `train[:100]`. Raises UserError for an unknown dataset, subset
    or split, or if the hub cannot be reached.
    """
    import datasets  # takes seconds to import; only hub datasets need it

    source = visible(config.source)
    try:
        dataset = datasets.load_dataset(config.source, config.subset, split=config.split)
    except ValueError as error:
        # Unknown split, unknown or missing subset: the library's message lists the valid ones.
        raise UserError(
            f"data.source: `{source}` (subset {config.subset}, split `{config.split}`): {_one_line(error)}"
        ) from error
    except (OSError, datasets.exceptions.DatasetsError) as error:  # not found, or no connection
        raise UserError(
            f"data.source: cannot load `{source}` from the hub: {_one_line(error)}; check the name and the connection, "
            "or give a local file"
        ) from error
    if config.max_rows is not None:
        dataset = dataset.select(range(min(config.max_rows, len(dataset))))
    return files.table_rows(dataset.with_format("arrow")[:])


def _one_line(error: Exception) -> str:
    return visible(" ".join(str(error).split()))
