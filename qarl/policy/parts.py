"""The part of `Policy` that weights, kept versions and teachers read; it avoids an import cycle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from qarl.config.quant import QuantConfig
from qarl.policy.linear import WeightSet


class PolicyParts(Protocol):
    """See `qarl.policy.policy.Policy` for the attributes."""

    @property
    def aligned(self) -> bool: ...

    @property
    def config(self) -> Any: ...

    @property
    def decoder(self) -> Any: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def head_master(self) -> nn.Parameter: ...

    @property
    def head_name(self) -> str: ...

    @property
    def kernels(self) -> bool: ...

    @property
    def learner_dtype(self) -> torch.dtype: ...

    @property
    def max_length(self) -> int: ...

    @property
    def quant(self) -> QuantConfig: ...

    @property
    def weights(self) -> WeightSet: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def predicting_states(
        self,
        prompts: list[list[int]],
        responses: list[list[int]],
        *,
        weights: WeightSet,
        written: list[list[bool]] | None,
    ) -> Tensor: ...
