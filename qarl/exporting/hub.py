"""Push an export to the Hugging Face hub, with its model card."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from qarl.errors import UserError
from qarl.utils.text import one_line


def create_repository(name: str, private: bool) -> str:
    """Create a model repository on the hub unless it exists, and return its full name.

    Call it before the export, so that a wrong name or a missing token fails early.

    Args:
        name: `user/name`, or `name` in the user's own namespace.
        private: Whether a new repository is private.

    Raises:
        UserError: The hub refuses the repository, or cannot be reached.
    """
    from huggingface_hub import HfApi

    return str(_request(name, lambda: HfApi().create_repo(name, private=private, exist_ok=True)).repo_id)


def push(repository: str, folder: Path, message: str) -> str:
    """Upload the files of an export as one commit, and return the address of the commit.

    Raises:
        UserError: The hub refuses, or cannot be reached; the export stays where it is.
    """
    from huggingface_hub import HfApi

    uploaded = _request(
        repository,
        lambda: HfApi().upload_folder(repo_id=repository, folder_path=str(folder), commit_message=message),
        f"; the export stays in {folder}",
    )
    return str(uploaded.commit_url)


def _request(name: str, action: Callable[[], Any], kept: str = "") -> Any:
    """Call `action`, and turn any error into one line: huggingface_hub also raises httpx errors, OSError, ValueError.

    kept: End of the message, about files that stay.
    """
    try:
        return action()
    except Exception as error:
        reason = one_line(error)[:300]
        fix = "run `hf auth login`, or check the name of the repository and the connection"
        raise UserError(f"--push-to-hub: {name}: {reason}; {fix}{kept}") from error
