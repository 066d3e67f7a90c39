"""The directory of an offline comparison: one JSON file a scheme, and comparison.json over all of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qarl.errors import UserError
from qarl.storage.disk import atomic_write_text, disk_errors

FORMAT_VERSION = 1
KIND = "offline"


@dataclass(frozen=True)
class Record:
    """out: the directory. settings: what the numbers depend on, plain JSON values; the same for every member."""

    out: Path
    settings: dict[str, Any]
    title: str
    command: list[str]
    environment: dict[str, Any]

    def member(self, scheme: str) -> dict[str, Any]:
        """What was measured of a scheme, or a pending member."""
        try:
            found = json.loads(self._file(scheme).read_text(encoding="utf-8"))
            if found["state"] == "finished" and found["settings"] == self.settings:
                return found["member"]
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not there, or not whole: it is measured again
        return {"name": scheme, "state": "pending", "reason": "not measured yet"}

    def keep(self, member: dict[str, Any]) -> None:
        """Keep a finished member for the next start."""
        text = json.dumps({"state": member["state"], "settings": self.settings, "member": member}, indent=1)
        with disk_errors(self.out, place="--out"):
            self._file(member["name"]).parent.mkdir(exist_ok=True)
            atomic_write_text(self._file(member["name"]), text)

    def save(self, members: list[dict[str, Any]]) -> dict[str, Any]:
        """Write comparison.json and return what it holds."""
        result = {
            "format_version": FORMAT_VERSION, "kind": KIND, "title": self.title, "command": self.command,
            "environment": self.environment, "settings": self.settings, "members": members,
        }  # fmt: skip
        with disk_errors(self.out, place="--out"):
            atomic_write_text(self.out / "comparison.json", json.dumps(result, indent=1, allow_nan=False) + "\n")
        return result

    def _file(self, scheme: str) -> Path:
        return self.out / "members" / f"{scheme}.json"


def open_out(out: Path, settings: dict[str, Any]) -> None:
    """Make `out`, or see that it holds this very comparison. Raises UserError if it holds anything else."""
    file = out / "comparison.json"
    if file.is_file():
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
            kind, held = before["kind"], before.get("settings")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{file}: is damaged; remove it, or choose another --out") from error
        if kind != KIND or not isinstance(held, dict):
            raise UserError(f"{out}: holds a comparison of {kind}; choose another --out")
        if changed := [key for key in settings if held.get(key) != settings[key]]:
            raise UserError(f"{out}: holds another comparison ({changed[0]} was {held.get(changed[0])}, is "
                            f"{settings[changed[0]]}); choose another --out, or remove it")  # fmt: skip
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists and is no comparison; choose another --out")
    with disk_errors(out, place="--out"):
        out.mkdir(parents=True, exist_ok=True)
