"""Where kernels are tested: on the GPU if there is one, else in Triton's interpreter on the CPU."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import triton.compiler
from qarl_kernels import launch as launching
from stub_driver import Compiled, Driver
from triton.runtime import driver


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is full of NaN (or of the largest integers), so that an element nobody wrote shows."""

    def poisoning(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def empty(*shape, **options):
            tensor = plain(*shape, **options)
            if tensor.dtype == torch.float8_e4m3fn:
                tensor.view(torch.uint8).fill_(0x7F)
                return tensor
            return tensor.fill_(torch.nan if tensor.dtype.is_floating_point else torch.iinfo(tensor.dtype).max)

        return empty

    monkeypatch.setattr(torch, "empty", poisoning(torch.empty))
    monkeypatch.setattr(torch, "empty_strided", poisoning(torch.empty_strided))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Compiled, tuple[Any, ...]]]]:
    """Launches so far, as (what ran, what it was given). Every tensor counts as one of device 0."""
    runs: list[tuple[Compiled, tuple[Any, ...]]] = []
    before = driver._active
    driver.set_active(Driver())
    monkeypatch.setattr(triton.compiler, "compile", lambda *given, **options: Compiled(runs))
    monkeypatch.setattr(launching, "device_index", lambda tensor: 0)
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    yield runs
    driver._active = before
