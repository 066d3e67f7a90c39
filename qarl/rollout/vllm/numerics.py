"""The interface of the arithmetic inside vLLM: the policy's forward (`exact/`), or vLLM's kernels (`own_kernels/`)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from qarl_kernels.logprob import Truncation
from torch import Tensor

from qarl.rollout.vllm.recording import Experts
from qarl.rollout.vllm.settings import SamplerSettings
from qarl.weight_sync.fingerprints import Fingerprint


class Numerics(Protocol):
    """The arithmetic of one vLLM, and the weights that it holds.

    Attributes:
        forward: The policy's forward inside vLLM; None if vLLM's own model computes.
        proved_frac: Fraction of the published bytes that `check` compares with what was sent.
    """

    forward: Any = None
    proved_frac: float

    def starting(self) -> AbstractContextManager[None]:
        """Return a context manager that is entered while vLLM starts."""

    def loaded(self, worker: Any) -> None:
        """Called when vLLM's worker has loaded the model, before it runs it."""

    def started(self, worker: Any, expected: Mapping[str, Fingerprint]) -> None:
        """Called when vLLM has started. expected: fingerprints of the snapshot in the checkpoint, by published name."""

    def base(self, name: str, expected: Mapping[str, Fingerprint]) -> Tensor:
        """Return a published tensor as the last publish left it; patches apply to a copy of it."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy published tensors, by name, into the model."""

    def check(self, version: int, expected: Mapping[str, Fingerprint]) -> None:
        """Raise PublishError unless the model holds the snapshot with these fingerprints."""

    def all_agree(self, well: bool) -> bool:
        """Return whether every process with a part of the model passes True; a collective of these processes."""
        return well

    def shape(self, truncation: Truncation) -> None:
        """Set the distribution that the next tokens are sampled from, if vLLM's sampler does not do it."""

    def experts(self) -> tuple[Experts, int]:
        """Return a reader of the experts of the last forward's rows, and the number of experts per layer."""

    def notes(self) -> list[str]:
        """Return the differences between vLLM's kernels and the scheme, one line each."""
        return []

    def before_sleep(self) -> None: ...

    def after_sleep(self) -> None: ...


def numerics_of(settings: SamplerSettings) -> Numerics:
    """Return the arithmetic that `settings.numerics` names. `own_kernels` is imported nowhere else in the sampler."""
    if settings.numerics == "exact":
        from qarl.rollout.vllm.exact.numerics import ExactNumerics

        return ExactNumerics(settings)
    from qarl.rollout.vllm.own_kernels.numerics import OwnKernels

    return OwnKernels(settings)
