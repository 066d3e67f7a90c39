"""`qarl_kernels.launch`: running and recording kernels, and the capability that they see."""

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from kernel_harness import NEEDS_TRITON
from qarl_kernels import library
from qarl_kernels.launch import capability_of, collecting, launch, recording, supports_tma

pytestmark = NEEDS_TRITON


@triton.jit
def _increment(x, out, N, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offsets, tl.load(x + offsets, mask=offsets < N) + 1, mask=offsets < N)


@pytest.mark.parametrize(
    ("given", "chosen"), [((8, 0), (8, 0)), ((9, 0), (9, 0)), ((10, 0), (10, 0)), ((12, 0), (8, 9)), ((12, 1), (8, 9))]
)
def test_blackwell_in_graphics_cards_gets_adas_kernels(given: tuple[int, int], chosen: tuple[int, int]) -> None:
    x = torch.zeros(16, 16)
    assert capability_of(x) == (9, 0), "the interpreter counts as Hopper"
    with recording(given):
        assert capability_of(x) == chosen and supports_tma(x) == (chosen >= (9, 0))


@pytest.mark.parametrize("grid", [(0,), (0, 3), (3, 0, 2)])
def test_an_empty_grid_launches_nothing(grid: tuple[int, ...], device: torch.device) -> None:
    out = torch.zeros(4, device=device)
    launch(_increment, grid, x=out, out=out, N=4, BLOCK=4)
    with recording() as launches:
        launch(_increment, grid, x=out, out=out, N=4, BLOCK=4)
    assert torch.equal(out, torch.zeros_like(out)) and launches == []


def test_recordings_collect_and_nest_and_launches_run_again_after_one_that_failed(device: torch.device) -> None:
    x, out = torch.zeros(4, device=device), torch.full((4,), 7.0, device=device)
    with pytest.raises(KeyError), recording((8, 0)) as outer:
        with recording((8, 9)) as inner:
            launch(_increment, [1, 2], num_warps=8, num_stages=5, x=x, out=out, N=4, BLOCK=4)
        assert capability_of(out) == (8, 0)
        launch(_increment, (2,), x=x, out=out, N=4, BLOCK=4)
        raise KeyError
    (recorded,) = inner
    assert recorded.kernel is _increment and recorded.grid == (1, 2) and [one.grid for one in outer] == [(2,)]
    assert recorded.arguments == {"x": x, "out": out, "N": 4, "BLOCK": 4}
    assert recorded.options["num_warps"] == 8 and recorded.options["num_stages"] == 5
    assert (out == 7).all()
    launch(_increment, (3,), num_warps=1, x=x, out=out, N=4, BLOCK=2)
    assert len(outer) == 1 and (out == 1).all()


def test_supports_tma_wants_aligned_rows(device: torch.device) -> None:
    wide = torch.empty(8, 64, dtype=torch.bfloat16, device=device)
    with recording((9, 0)):
        assert supports_tma(wide)
        assert supports_tma(wide[:, :40])  # rows 128 bytes apart, whatever is left of them
        assert supports_tma(wide[:, 8:])  # starts 16 bytes in
        assert not supports_tma(wide[:, 1:])  # starts 2 bytes in
        assert not supports_tma(wide.t())  # the last dimension is not contiguous
        assert not supports_tma(torch.empty(8, 60, dtype=torch.bfloat16, device=device))  # rows 120 bytes apart
        assert not supports_tma(wide[:0])
        assert not supports_tma(torch.empty(8, 8, dtype=torch.int8, device=device))  # rows 8 bytes apart
        assert supports_tma(torch.empty(8, 16, dtype=torch.int8, device=device))


def test_the_library_is_not_tried_while_launches_are_recorded() -> None:
    """Its bits would be compared with those of a kernel that did not run, and refused for good."""
    rows = SimpleNamespace(device=SimpleNamespace(type="cuda"), shape=(8192, 64))
    assert not collecting()
    with recording():
        assert collecting() and library.product(rows, None, None, pytest.fail) == 0
    assert not collecting()
