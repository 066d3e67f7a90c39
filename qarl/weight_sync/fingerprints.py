"""Fingerprints of tensors, computed on their device: what the holders of one version compare during a run.

Files are described by sha256 (`qarl.weight_sync.snapshot.Manifest`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

PORTION = 1 << 30  # bytes of tensors whose digests one launch computes; then they are released


@dataclass(frozen=True)
class Fingerprint:
    """shape, dtype (as torch prints it) and digest of the bytes in row-major order.

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
    """Fingerprints by name, in the order given; waits for a GPU once.

    tensors: (name, tensor) with distinct names. Of tensors made for this call, about `PORTION` bytes live at once.
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
    """Digests of one GPU's tensors, which are kept only until their portion is launched."""

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
