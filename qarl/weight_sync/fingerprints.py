"""Fingerprints of tensors, computed on their device, and the comparison that verifies a publish.

Files are described by sha256 (`qarl.weight_sync.snapshot.Manifest`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qarl.errors import UserError

METADATA = (".weight_shape",)  # suffixes of tensors that no kernel reads and that never change: int64 (2,)
PORTION = 1 << 30  # bytes of tensors that one launch digests; they are released afterwards


@dataclass(frozen=True)
class Fingerprint:
    """Shape, dtype (as torch prints it) and digest of a tensor's bytes in row-major order.

    digest: "mix64:<hex>" on a GPU, computed there (`qarl_kernels.digest`), "sha256:<hex>" on the CPU.
    """

    shape: tuple[int, ...]
    dtype: str
    digest: str

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype.removeprefix("torch."))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


def fingerprints(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Fingerprint]:
    """Compute fingerprints by name, in the given order. Synchronizes with a GPU once.

    tensors: (name, tensor) with distinct names. If the iterable creates tensors lazily, about `PORTION` bytes are alive
        at once.
    """
    found: dict[str, Fingerprint] = {}
    portions: dict[torch.device, _Portions] = {}
    for name, tensor in tensors:
        assert name not in found, f"{name} comes twice"
        digest = ""
        if tensor.is_cuda:
            portions.setdefault(tensor.device, _Portions()).add(name, tensor)
        else:
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            digest = f"sha256:{hashlib.sha256(data.numpy().data).hexdigest()}"
        found[name] = Fingerprint(tuple(tensor.shape), str(tensor.dtype), digest)
    for on_device in portions.values():
        for name, digest in on_device.digests().items():
            found[name] = Fingerprint(found[name].shape, found[name].dtype, f"mix64:{digest}")
    return found


class _Portions:
    """Digests of one GPU's tensors. A tensor is referenced only until its portion is launched."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._sums: list[Tensor] = []
        self._waiting: list[Tensor] = []
        self._bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        self._sizes[name] = tensor.nbytes
        self._waiting.append(tensor)
        self._bytes += tensor.nbytes
        if self._bytes >= PORTION:
            self._launch()

    def _launch(self) -> None:
        from qarl_kernels.digest import digest_sums  # imports Triton, which the CPU does not need

        self._sums.append(digest_sums(self._waiting))
        self._waiting, self._bytes = [], 0

    def digests(self) -> dict[str, str]:
        from qarl_kernels.digest import finish_digests

        if self._waiting:
            self._launch()
        return dict(zip(self._sizes, finish_digests(torch.cat(self._sums), list(self._sizes.values())), strict=True))


class PublishError(UserError):
    """The sampler does not hold what the learner published."""


def verify(
    version: int, expected: Mapping[str, Fingerprint], held: Mapping[str, Fingerprint], where: str = "the sampler"
) -> None:
    """Raise `PublishError` unless `held` equals `expected`: every name, shape, dtype and byte, in any order.

    version: Policy version, for the error. where: Who holds the tensors, for the error.
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


def verify_in_process(version: int, published: Mapping[str, Tensor], held: Iterable[tuple[str, Tensor]]) -> None:
    """Run `verify` for a sampler in this process. Tensors that are the published objects are not digested.

    published: The snapshot's tensors. held: (name, tensor) with distinct names.
    """
    shown = dict(held)
    own = [name for name, tensor in shown.items() if tensor is published.get(name)]
    expected, found = dict.fromkeys(published, SAME), dict.fromkeys(own, SAME)
    others = fingerprints((name, tensor) for name, tensor in shown.items() if name not in found)
    wanted = fingerprints((name, published[name]) for name in others if name in published)
    verify(version, expected | wanted, found | others, "the sampler")
