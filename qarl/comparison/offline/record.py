"""The directory of an offline comparison: one JSON file per scheme, and comparison.json for all of them."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qarl.errors import UserError
from qarl.inputs.files import Unreadable
from qarl.inputs.json import body_digest, read_json_object
from qarl.storage.disk import disk_errors, require_kinds, require_output, write_json

FORMAT_VERSION = 1
KIND = "offline"


@dataclass(frozen=True)
class Record:
    """Stored results.

    Attributes:
        out: The directory.
        settings: JSON values that determine the numbers, common to all members.
        title: Title of the page.
        command: Arguments of the process.
        environment: Versions and hardware, see `describe_environment`.
    """

    out: Path
    settings: dict[str, Any]
    title: str
    command: list[str]
    environment: dict[str, Any]

    def member(self, scheme: str) -> dict[str, Any]:
        """Return the stored results of a scheme, or a pending member."""
        with suppress(Unreadable):  # missing or damaged: it is measured again
            found = read_json_object(self._file(scheme))
            if found.get("sha256") == body_digest(found) and found.get("key") == self._key(scheme):
                return found["member"]
        return {"name": scheme, "state": "pending", "reason": "not measured yet"}

    def keep(self, member: dict[str, Any]) -> None:
        """Store a finished member, so that the next start does not measure it again."""
        body = {"key": self._key(member["name"]), "member": member}
        with disk_errors(self.out, place="--out"):
            self._file(member["name"]).parent.mkdir(exist_ok=True)
        write_json(self._file(member["name"]), {**body, "sha256": body_digest(body)}, "--out")

    def _key(self, scheme: str) -> dict[str, Any]:
        """Return everything that determines a member's results and their layout."""
        return {"format_version": FORMAT_VERSION, "scheme": scheme, "settings": self.settings}

    def save(self, members: list[dict[str, Any]]) -> dict[str, Any]:
        """Write comparison.json and return its content."""
        result = {
            "format_version": FORMAT_VERSION,
            "kind": KIND,
            "title": self.title,
            "command": self.command,
            "environment": self.environment,
            "settings": self.settings,
            "members": members,
        }
        write_json(self.out / "comparison.json", result, "--out")
        return result

    def _file(self, scheme: str) -> Path:
        return self.out / "members" / f"{scheme}.json"


def open_out(out: Path, settings: dict[str, Any]) -> None:
    """Create `out`, or check that it holds the same comparison.

    Raises:
        UserError: It holds anything else.
    """
    require_output(out, "--out", folder=True)
    require_kinds(out, ("comparison.json", "comparison.html"), ("members", "plots"), "--out")
    file = out / "comparison.json"
    if file.is_file():
        try:
            before = read_json_object(file)
        except Unreadable as error:
            raise UserError(f"{error}; remove it, or choose another --out") from error
        kind, held = before.get("kind"), before.get("settings")
        if kind != KIND or not isinstance(held, dict):
            raise UserError(f"{out}: holds a comparison of {kind}; choose another --out")
        if changed := [key for key in settings if held.get(key) != settings[key]]:
            raise UserError(
                f"{out}: holds another comparison ({changed[0]} was {held.get(changed[0])}, is "
                f"{settings[changed[0]]}); choose another --out, or remove it"
            )
    elif out.exists() and any(out.iterdir()):
        raise UserError(f"{out}: exists and is not a comparison; choose another --out")
    with disk_errors(out, place="--out"):
        out.mkdir(parents=True, exist_ok=True)
