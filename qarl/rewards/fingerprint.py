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
    """Return the SHA-256 of each reward function, by label as in `RewardResult`.

    For a built-in, the digest covers its name and options. For a custom function it covers the function's name, the
    options, and the source of its file and of everything it imports, directly or indirectly, from the same directory
    (`path/to/file.py:function`) or the same top-level package (`package.module:function`). Libraries, the path and the
    weight are not covered: moving a directory does not change the reward, and the weight is part of the configuration.

    Args:
        config: A `RewardConfig`.

    Raises:
        UserError: A file cannot be read.
    """
    names = labels([function.name for function in config.functions])
    return {label: _digest(function) for label, function in zip(names, config.functions, strict=True)}


def _digest(function: NamedFunction) -> str:
    parts: list[Any] = [function.name.rpartition(":")[2], function.options]
    if function.name not in BUILTINS:
        parts += source_parts(function.name, f"reward.functions: `{function.name}`")
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
