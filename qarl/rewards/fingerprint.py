"""Digests of reward functions and their source files, to detect edited rewards."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Protocol

from qarl.inputs.sources import source_parts
from qarl.rewards.builtin import BUILTINS
from qarl.rewards.loader import labels

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class NamedFunction(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def options(self) -> Mapping[str, Any]: ...


class Functions(Protocol):
    @property
    def functions(self) -> Sequence[NamedFunction]: ...


def reward_fingerprint(config: Functions) -> dict[str, str]:
    """SHA-256 of each of `config.functions` (a `RewardConfig`), by label as in `RewardResult`.

    A built-in: its name and options. One of the user's: the function's name, the options, and the bytes of its file
    and of those that it imports, directly or through others, out of the same directory (`path/to/file.py:function`)
    or the same top-level package (`package.module:function`). Neither the path nor the weight counts: a moved
    directory is no other reward, and the configuration shows the weight. Libraries do not count.

    Raises UserError for a file that cannot be read.
    """
    names = labels([function.name for function in config.functions])
    return {label: _digest(function) for label, function in zip(names, config.functions, strict=True)}


def _digest(function: NamedFunction) -> str:
    parts: list[Any] = [function.name.rpartition(":")[2], function.options]
    if function.name not in BUILTINS:
        parts += source_parts(function.name, f"reward.functions: `{function.name}`")
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
