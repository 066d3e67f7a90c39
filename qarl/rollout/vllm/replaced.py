"""Replaces an attribute of vLLM or torch for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ABSENT = object()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, an attribute of a module, class or object has this value."""
    before = vars(owner).get(name, ABSENT)  # absent: an object's method, which is its class's
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
