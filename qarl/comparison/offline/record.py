"""The directory of an offline comparison: one JSON file per scheme, and comparison.json for all of them."""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict

from qarl.errors import UserError
from qarl.inputs.files import Unreadable
from qarl.inputs.json import read_json_object
from qarl.inputs.schema import Bytes, checked
from qarl.inputs.schema import Record as Schema
from qarl.storage.disk import atomic_write_text, disk_errors, require_kinds, require_output
from qarl.storage.runs import Number
from qarl.storage.saved_state import Count

FORMAT_VERSION = 1
KIND = "offline"


class _Values(Schema):
    """Base class that forbids other keys, so that stored results can be used directly."""

    model_config = ConfigDict(extra="forbid")


class _Mean(_Values):
    mean: Number | None
    low: Number | None
    high: Number | None


class _Divergence(_Mean):
    median: Number
    p99: Number
    max: Number


class _Rate(_Values):
    median: Number
    low: Number
    high: Number


class _Layer(_Values):
    module: str
    layer: Count | None
    kind: str
    relative: Number | None
    sqnr_db: Number | None
    max_abs: Number


class _Member(_Values):
    """Results of a scheme, as the table and the page read them."""

    name: str
    state: Literal["finished"]
    reason: None
    group_size: Count | None
    kl: _Divergence
    top1_agreement: _Mean
    perplexity: _Mean
    perplexity_ratio: _Mean
    checkpoint_bytes: Bytes
    checkpoint_ratio: Number
    prefill_tokens_per_s: _Rate
    decode_tokens_per_s: _Rate
    weight_error: list[_Layer]
    seconds: Number


class _Kept(_Values):
    state: Literal["finished"]
    settings: dict[str, Any]
    member: _Member


@dataclass(frozen=True)
class Record:
    """Stored results.

    Args:
        out: The directory.
        settings: JSON values that determine the numbers, common to all members.
    """

    out: Path
    settings: dict[str, Any]
    title: str
    command: list[str]
    environment: dict[str, Any]

    def member(self, scheme: str) -> dict[str, Any]:
        """Return the stored results of a scheme, or a pending member."""
        with suppress(Unreadable):  # missing or incomplete: it is measured again
            found = read_json_object(self._file(scheme))
            kept = checked(_Kept, found, scheme)
            if kept.settings == self.settings and kept.member.name == scheme:
                return found["member"]
        return {"name": scheme, "state": "pending", "reason": "not measured yet"}

    def keep(self, member: dict[str, Any]) -> None:
        """Keep a finished member for the next start."""
        text = json.dumps({"state": member["state"], "settings": self.settings, "member": member}, indent=1)
        with disk_errors(self.out, place="--out"):
            self._file(member["name"]).parent.mkdir(exist_ok=True)
            atomic_write_text(self._file(member["name"]), text)

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
        with disk_errors(self.out, place="--out"):
            atomic_write_text(self.out / "comparison.json", json.dumps(result, indent=1, allow_nan=False) + "\n")
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
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists and is not a comparison; choose another --out")
    with disk_errors(out, place="--out"):
        out.mkdir(parents=True, exist_ok=True)
