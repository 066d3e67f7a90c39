"""Digests of reward functions and their source files, to detect edited rewards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qarl.inputs.sources import source_parts
from qarl.rewards.loader import labels

if TYPE_CHECKING:
    from qarl.config.reward import RewardFunction


def reward_fingerprint(functions: Sequence[RewardFunction]) -> dict[str, str]:
    """Return the SHA-256 of each reward function, by label as in `RewardResult`.

    For a built-in, the digest covers its name and options. For a custom function it covers the function's name, the
    options, and the source of its file and of everything it imports, directly or indirectly, from the same directory
    (`path/to/file.py:function`) or the same top-level package (`package.module:function`). Libraries, the path and the
    weight are not covered: moving a directory does not change the reward, and the weight is part of the configuration.

    Raises:
        UserError: A file cannot be read.
    """
    names = labels([function.name for function in functions])
    return {label: _digest(function) for label, function in zip(names, functions, strict=True)}


def _digest(function: RewardFunction) -> str:
    parts: list[Any] = [function.name.rpartition(":")[2], function.options]
    if not function.builtin:
        parts += source_parts(function.name, f"reward.functions: `{function.name}`")
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
