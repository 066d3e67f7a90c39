"""A weight update as an order to a sampler, and as plain data on the way there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from qarl.weight_sync.fingerprints import Fingerprint
from qarl.weight_sync.parcels import Parcel


@dataclass(frozen=True)
class WeightUpdate:
    """One update. content: a parcel of a carrier, one for each process of a `TeamCarrier`; in one process the tensors
    and patches by name.

    expected: fingerprints of the whole snapshot. canary: token sequences to score afterwards.
    """

    version: int
    content: Any
    expected: Mapping[str, Fingerprint]
    canary: Sequence[list[int]]


@dataclass(frozen=True)
class _Stored:
    version: int
    content: Parcel
    expected: dict[str, Fingerprint]
    canary: list[list[int]]


_ADAPTER = TypeAdapter(_Stored)


def dump_update(update: WeightUpdate) -> Any:
    """An update whose content is a parcel, as JSON values."""
    stored = _Stored(update.version, update.content, dict(update.expected), list(update.canary))
    return _ADAPTER.dump_python(stored, mode="json")


def load_update(body: Any) -> WeightUpdate:
    """The update that `dump_update` wrote. Raises pydantic's ValidationError for anything else."""
    stored = _ADAPTER.validate_python(body)
    return WeightUpdate(stored.version, stored.content, stored.expected, stored.canary)
