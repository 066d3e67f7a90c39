"""The sampler's side of weight sync: from what arrived to tensors that are proved to be what was sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor

from qarl.weight_sync.delta import Patch, apply_patch
from qarl.weight_sync.fingerprints import Fingerprint, fingerprints
from qarl.weight_sync.parcels import Parcel
from qarl.weight_sync.plan import unflatten
from qarl.weight_sync.transport import ReceiverPlan, open_receiver
from qarl.weight_sync.verify import verify

Arriving = Iterable[tuple[str, Tensor | Patch]]


class WeightReceiver:
    """The other end of the learner's carrier, in the sampler's process. plan: what the learner says to open."""

    def __init__(self, plan: ReceiverPlan) -> None:
        self._receiver = open_receiver(plan)

    def take(self, parcel: Parcel) -> Iterator[tuple[str, Tensor | Patch]]:
        """The tensors and patches of an update by tensor name. They last until `done`."""
        return unflatten(self._receiver.take(parcel))

    def done(self) -> None:
        """Finish reading: whatever was queued on the tensors has run when this returns."""
        self._receiver.done()


def arrived(
    version: int, arriving: Arriving, expected: Mapping[str, Fingerprint], base: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """What arrives as tensors, by name: patches applied to copies of what is held, all proved to be what was sent.

    expected: fingerprints of the whole snapshot. base(name): the tensor that is held, as it was published last.
    Raises PublishError: other bytes arrived than were sent.
    """
    tensors: dict[str, Tensor] = {}
    for name, item in arriving:
        if isinstance(item, Patch):
            tensors[name] = base(name).clone()
            apply_patch(tensors[name], item)
        else:
            tensors[name] = item
    sent = {name: expected[name] for name in tensors if name in expected}
    verify(version, sent, fingerprints(tensors.items()), "what arrived")
    return tensors
