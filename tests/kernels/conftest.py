"""Test kernels on the GPU if there is one, else in Triton's interpreter on the CPU."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import triton.compiler
from qarl_kernels import head
from qarl_kernels import launch as launching
from qarl_kernels.tuning import Tile
from stub_driver import Compiled, Driver
from triton.runtime import driver

GUARD = 4096  # bytes on each side


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill fresh memory with NaN (or the largest integers), so that tests detect elements that were not written.

    It lies between guards, which a write outside of an output breaks.
    """
    plain, empty_strided, guarded = torch.empty, torch.empty_strided, []

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.float8_e4m3fn:
            tensor.view(torch.uint8).fill_(0x7F)
            return tensor
        return tensor.fill_(torch.nan if tensor.dtype.is_floating_point else torch.iinfo(tensor.dtype).max)

    def empty(*shape, dtype=None, device=None, **options):
        if options or str(device) == "meta":
            return plain(*shape, dtype=dtype, device=device, **options)
        shape, dtype = torch.Size(shape if isinstance(shape[0], int) else shape[0]), dtype or torch.get_default_dtype()
        size = shape.numel() * dtype.itemsize
        memory = plain(size + 2 * GUARD, dtype=torch.uint8, device=device).fill_(0xA5)
        guarded.append((memory, size))
        return poison(memory[GUARD : GUARD + size].view(dtype).view(shape))

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "empty_strided", lambda *given, **options: poison(empty_strided(*given, **options)))
    yield
    for memory, size in guarded:
        assert (memory[:GUARD] == 0xA5).all() and (memory[GUARD + size :] == 0xA5).all(), "a guard was written"


@pytest.fixture
def small_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, use output-layer tiles so small that small cases need several."""
    if launching.INTERPRETED:
        monkeypatch.setattr(head, "STATISTICS_TILE", Tile("x_first", 64, 64, 16))
        monkeypatch.setattr(head, "GRADIENT_TILE", Tile("x_first", 64, 64, 16))
        monkeypatch.setattr(head, "GRADIENT_CUT", Tile("x_first", 32, 64, 16))
        monkeypatch.setattr(head, "POINTERS", Tile("x_first", 16, 32, 16))


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
