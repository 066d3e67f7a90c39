"""Interface of the model inside vLLM: the policy's forward (`exact/`), or vLLM's own (`own_kernels/`)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from qarl_kernels.logprob import Truncation
from torch import Tensor

from qarl.rollout.vllm.recording import Experts
from qarl.weight_sync.fingerprints import Fingerprint


class Numerics:
    """The model and the weights of one vLLM.

    Attributes:
        forward: The policy's forward (`ExactModel`); None if vLLM runs its own model.
        proved_frac: Fraction of the published bytes that `check` compares with those that were sent.
    """

    forward: Any = None
    proved_frac: float

    def starting(self) -> AbstractContextManager[None]:
        """Return a context manager in which vLLM must be started."""
        raise NotImplementedError

    def loaded(self, worker: Any) -> None:
        """Called after vLLM's worker has loaded the model and before it runs the model."""

    def started(self, worker: Any, expected: Mapping[str, Fingerprint]) -> None:
        """Called after vLLM has started. expected: fingerprints of the checkpoint's snapshot, by published name."""
        raise NotImplementedError

    def base(self, name: str, expected: Mapping[str, Fingerprint]) -> Tensor:
        """Return a published tensor of the last publish, which a patch is applied to."""
        raise NotImplementedError

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy published tensors, by name, into the model."""
        raise NotImplementedError

    def check(self, version: int, expected: Mapping[str, Fingerprint]) -> None:
        """Raise PublishError unless the model holds the snapshot with these fingerprints."""
        raise NotImplementedError

    def all_agree(self, ok: bool) -> bool:
        """Return whether every process with a part of the model passes True. A collective of these processes."""
        return ok

    def shape(self, truncation: Truncation) -> None:
        """Set temperature and truncation of the next tokens, if vLLM's own sampler does not apply them."""

    def experts(self) -> tuple[Experts, int]:
        """Return a function that reads the experts of the last forward's rows, and the number of experts per layer."""
        raise NotImplementedError

    def notes(self) -> list[str]:
        """Return the differences between vLLM's kernels and the scheme, one line each."""
        return []

    def before_sleep(self) -> None:
        """Save what a sleep of vLLM would lose."""

    def after_sleep(self) -> None:
        """Restore what `before_sleep` saved."""
