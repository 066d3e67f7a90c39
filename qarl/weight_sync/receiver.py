"""The sampler's side of a publish: from received tensors and patches to tensors that are proved to be what was sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from qarl.weight_sync.fingerprints import Fingerprint, fingerprints
from qarl.weight_sync.update import PATCH, patched
from qarl.weight_sync.verify import verify

Arriving = Iterable[tuple[str, Tensor]]


def receive(
    version: int, arriving: Arriving, expected: Mapping[str, Fingerprint], base: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """Apply patches to copies of held tensors, and verify everything that arrived.

    Args:
        version: Of the policy, for errors.
        arriving: Tensors by name, and patches by name + `PATCH`.
        expected: Fingerprints of all tensors of the version.
        base: Returns the held tensor of a name.

    Returns:
        New tensors by name.

    Raises:
        PublishError: The received bytes are not the sent ones.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in arriving:
        if name.endswith(PATCH):
            name = name.removesuffix(PATCH)
            tensor = patched(base(name), tensor)
        tensors[name] = tensor
    sent = {name: expected[name] for name in tensors if name in expected}
    verify(version, sent, fingerprints(tensors.items()), "what arrived")
    return tensors
