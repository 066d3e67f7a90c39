"""Datasets of the Hugging Face hub or its local cache. The only module that imports `datasets`."""

from __future__ import annotations

from typing import Any

import datasets

from qarl.errors import UserError
from qarl.utils.text import visible


def load(name: str, subset: str | None, split: str, max_rows: int | None) -> list[dict[str, Any]]:
    """Load the rows of one split. `split` may use the library's slice syntax, as in `train[:100]`.

    Raises UserError for an unknown dataset, subset or split, or if the hub cannot be reached.
    """
    try:
        dataset = datasets.load_dataset(name, subset, split=split)
    except ValueError as error:
        # Unknown split, unknown or missing subset: the library's message lists the valid ones.
        raise UserError(
            f"data.source: `{visible(name)}` (subset {subset}, split `{split}`): {_one_line(error)}"
        ) from error
    except (OSError, datasets.exceptions.DatasetsError) as error:  # not found, or no connection
        raise UserError(
            f"data.source: cannot load `{visible(name)}` from the hub: {_one_line(error)}; "
            "check the name and the connection, or give a local file"
        ) from error
    if max_rows is not None:
        dataset = dataset.select(range(min(max_rows, len(dataset))))
    return dataset.to_list()


def _one_line(error: Exception) -> str:
    return visible(" ".join(str(error).split()))
