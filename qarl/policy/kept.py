"""Older policy versions, on the device or in host memory: asynchronous rollouts sampled responses with them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qarl.policy.linear import WeightSet
from qarl.policy.parts import PolicyParts
from qarl.policy.weights import learner_weights
from qarl.weight_sync.snapshot import Snapshot


@dataclass(frozen=True)
class _Version:
    """One kept version. weights: The weights of the learner's forward; None: not built."""

    snapshot: Snapshot
    weights: WeightSet | None
    on_host: bool


class KeptVersions:
    """The published tensors of some versions, and the learner's weights for forwards at these versions.

    A version on the device also keeps its prepared weights (`LowBitWeight.prepare`), so a forward costs nothing extra.
    In host memory it keeps only the published tensors. A forward then copies them to the device in one transfer and
    prepares them again, which gives the same bits.

    Args:
        policy: The learner's policy.
        on_host: Move a version to host memory when the next one is added.
    """

    def __init__(self, policy: PolicyParts, on_host: bool) -> None:
        self._policy, self._moves = policy, on_host
        self._versions: dict[int, _Version] = {}

    def __contains__(self, version: int) -> bool:
        return version in self._versions

    def add(self, snapshot: Snapshot, weights: WeightSet | None = None) -> None:
        """Keep a version whose tensors are on the device.

        Args:
            snapshot: Its published tensors.
            weights: The learner's weights for it. None: built when `weights` needs them.
        """
        if self._moves:
            for version, kept in self._versions.items():
                if not kept.on_host:
                    self._versions[version] = _Version(kept.snapshot.copied(self._host_buffer), None, True)
            self._synchronize()
        self._versions[snapshot.version] = _Version(snapshot, weights, False)

    def snapshot(self, version: int) -> Snapshot:
        """Return the published tensors of a version, on the device or in host memory."""
        return self._versions[version].snapshot

    def tensors(self, versions: Collection[int]) -> dict[str, Tensor]:
        """Return the published tensors of some versions for a checkpoint, by `VERSION/NAME`."""
        return {f"{v}/{name}": tensor for v in sorted(versions) for name, tensor in self.snapshot(v).tensors.items()}

    def on_device(self, version: int) -> Snapshot:
        """Return the published tensors of a version on the device: a copy if they are in host memory."""
        kept, device = self._versions[version], self._policy.device
        if not kept.on_host:
            return kept.snapshot
        return kept.snapshot.copied(lambda size: torch.empty(size, dtype=torch.uint8, device=device))

    def weights(self, version: int) -> WeightSet:
        """Return the learner's weights of a version. At most one copy is on the device; `release` frees it."""
        kept = self._versions[version]
        if kept.weights is None:
            self.release()
            weights = learner_weights(self._policy, self.on_device(version), {})
            self._versions[version] = kept = _Version(kept.snapshot, weights, kept.on_host)
        assert kept.weights is not None, "built above"
        return kept.weights

    def release(self) -> None:
        """Free the device copy of a version in host memory, after the last forward that reads it."""
        for version, kept in self._versions.items():
            if kept.on_host and kept.weights is not None:
                self._versions[version] = _Version(kept.snapshot, None, True)

    def keep(self, versions: Collection[int]) -> None:
        """Forget all versions but these."""
        for version in self._versions.keys() - set(versions):
            del self._versions[version]

    def _host_buffer(self, size: int) -> Tensor:
        """torch reuses the memory of freed buffers, and rounds pinned ones up to a power of two bytes."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._policy.device.type == "cuda")

    def _synchronize(self) -> None:
        """Wait until the copies to host memory are complete: a checkpoint reads them without a stream."""
        if self._policy.device.type == "cuda":
            torch.cuda.current_stream(self._policy.device).synchronize()


def saved_versions(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Return the tensors that `KeptVersions.tensors` saved, by name, of each version in ascending order.

    tensors: tensors of the checkpoint, among them others, whose names do not begin with a version.
    """
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        version, _, own = name.partition("/")
        if own and version != "routing":
            found.setdefault(int(version), {})[own] = tensor
    return dict(sorted(found.items()))
