"""Full and delta updates: a publish sends all tensors, or only the changed words of changed tensors.

An optimizer step changes few codes of a quantized weight, because most masters stay within their rounding interval. A
patch holds the changed 32-bit words of a tensor: int32 (2, n), indices and new values. It is int64 if the tensor has
2^31 words or more. It travels under the tensor's name + `PATCH`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from qarl.weight_sync.fingerprints import Fingerprint, fingerprints, verify
from qarl.weight_sync.transport import bytes_of

PATCH = "#patch"
PORTION = 256 << 20  # bytes that `receive` takes between two calls of `meanwhile`
Prints = Mapping[str, Fingerprint]


def delta(
    new: Mapping[str, Tensor], new_prints: Prints, old: Mapping[str, Tensor], old_prints: Prints
) -> dict[str, Tensor]:
    """Return the tensors of `new` that differ from `old`, each as a patch or whole, whichever is smaller.

    old: the tensors that the receiver holds, of the same names, shapes and dtypes.
    """
    assert old_prints.keys() == new_prints.keys() == new.keys(), "versions of one model have the same tensors"
    sent: dict[str, Tensor] = {}
    for name, tensor in new.items():
        if new_prints[name] != old_prints[name]:
            patch = patch_of(old[name], tensor)
            sent |= {name + PATCH: patch} if patch.nbytes < tensor.nbytes else {name: tensor}
    return sent


def patch_of(old: Tensor, new: Tensor) -> Tensor:
    """Return the patch that turns `old` into `new`, on their device. Both have the same shape, dtype and device."""
    assert (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device), (old.shape, new.shape)
    words = _words(new)
    places = (_words(old) != words).nonzero()[:, 0]
    return torch.stack([places, words[places]]).to(torch.int32 if words.numel() < 2**31 else torch.int64)


def patched(tensor: Tensor, patch: Tensor) -> Tensor:
    """Return a copy of `tensor` with a patch applied. The copy is contiguous, on the tensor's device."""
    words = _words(tensor.clone())
    places, values = patch.to(words.device)
    words[places.long()] = values.int()
    return words.view(torch.uint8)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _words(tensor: Tensor) -> Tensor:
    """Return the bytes in row-major order as int32, zero-padded: a view if size and address are multiples of four."""
    data = bytes_of(tensor)
    if data.numel() % 4 or data.storage_offset() % 4:
        data = pad(data, (0, -data.numel() % 4))
    return data.view(torch.int32)


@dataclass(frozen=True)
class WeightUpdate:
    """A publish as a request to a sampler."""

    version: int
    payloads: Sequence[Any]  # one per process of the sampler; in the learner's process one list of (name, tensor)
    expected: Prints  # of all tensors of the version
    canary: Sequence[list[int]]  # token sequences to score after loading


Arriving = Iterable[tuple[str, Tensor]]


def receive(
    version: int,
    arriving: Arriving,
    expected: Mapping[str, Fingerprint],
    base: Callable[[str], Tensor],
    meanwhile: Callable[[], None] = lambda: None,
) -> dict[str, Tensor]:
    """Receive an update: apply patches to copies of the current tensors, and verify all results.

    Args:
        version: Policy version, for errors.
        arriving: (name, tensor), or (name + `PATCH`, patch).
        expected: Fingerprints of all tensors of the version.
        base: Returns the sampler's current tensor by name.
        meanwhile: Called after every `PORTION` bytes, for other work.

    Returns:
        The tensors that were sent, by name; patched ones in full.

    Raises:
        PublishError: The received bytes are not the sent ones.
    """
    tensors: dict[str, Tensor] = {}
    waiting = 0
    for name, tensor in arriving:
        waiting += tensor.nbytes
        if waiting > PORTION:
            waiting = 0
            meanwhile()
        if name.endswith(PATCH):
            name = name.removesuffix(PATCH)
            tensor = patched(base(name), tensor)
        tensors[name] = tensor
    sent = {name: expected[name] for name in tensors if name in expected}
    verify(version, sent, fingerprints(tensors.items()), "what arrived")
    return tensors
