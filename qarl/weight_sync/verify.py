"""Verify that a sampler holds exactly what was published."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from qarl.errors import UserError
from qarl.weight_sync.fingerprints import Fingerprint, fingerprints


class PublishError(UserError):
    """The sampler does not hold what the learner published."""


def verify(
    version: int, expected: Mapping[str, Fingerprint], held: Mapping[str, Fingerprint], where: str = "the sampler"
) -> None:
    """Raise `PublishError` unless `held` equals `expected`: every name, shape, dtype and byte, in any order.

    version, where (the holder): for the error.
    """
    for name, found in held.items():
        wanted = expected.get(name)
        if wanted is None:
            raise PublishError(f"publish of version {version}: {where} holds '{name}', which was not sent")
        if found != wanted:
            what = (
                "bytes"
                if found.shape == wanted.shape and found.dtype == wanted.dtype
                else f"{found.dtype} {found.shape} for {wanted.dtype} {wanted.shape}"
            )
            raise PublishError(f"publish of version {version}: '{name}' differs in {where} ({what})")
    missing = [name for name in expected if name not in held]
    if missing:
        raise PublishError(
            f"publish of version {version} is partial: {len(missing)} of {len(expected)} tensors did "
            f"not arrive in {where}, first '{missing[0]}'"
        )


SAME = Fingerprint((), "", "the same tensor")


def verify_in_process(
    version: int, published: Mapping[str, Tensor], held: Iterable[tuple[str, Tensor]], where: str = "the sampler"
) -> None:
    """`verify` for a holder in this process, which may hold the published tensors themselves; only others are digested.

    published: the snapshot's tensors. held: (name, tensor), each once.
    """
    shown = dict(held)
    own = [name for name, tensor in shown.items() if tensor is published.get(name)]
    expected, found = dict.fromkeys(published, SAME), dict.fromkeys(own, SAME)
    others = fingerprints((name, tensor) for name, tensor in shown.items() if name not in found)
    wanted = fingerprints((name, published[name]) for name in others if name in published)
    verify(version, expected | wanted, found | others, where)


Shown = Mapping[str, list[Fingerprint]]


def verify_changes(version: int, sent: tuple[Shown, Shown], held: tuple[Shown, Shown], where: str) -> None:
    """Raise `PublishError` unless each layer that hides its published tensors changed exactly when they did.

    sent: fingerprints of the tensors sent for each layer, by its name, in the last version and in this one. held: those
    of the layer's own tensors then and now. where: the error's word for a layer.
    """
    for name, before in sent[0].items():
        moved = sent[1][name] != before
        if moved != (held[1][name] != held[0][name]):
            what = "did not change with its weights" if moved else "changed by itself"
            raise PublishError(f"publish of version {version}: {where} '{name}' {what}")
