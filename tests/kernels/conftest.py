"""Where kernels are tested: on the GPU if there is one, else in Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is full of NaN (or of the largest integers), so that an element nobody wrote shows."""
    plain = torch.empty

    def empty(*shape, **options):
        tensor = plain(*shape, **options)
        if tensor.dtype == torch.float8_e4m3fn:
            tensor.view(torch.uint8).fill_(0x7F)
            return tensor
        return tensor.fill_(torch.nan if tensor.dtype.is_floating_point else torch.iinfo(tensor.dtype).max)

    monkeypatch.setattr(torch, "empty", empty)
