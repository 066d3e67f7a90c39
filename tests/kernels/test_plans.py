"""`qarl_kernels.plans`: a plan launches what its function would, and functions that it cannot repeat are run."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from qarl_kernels import direct, plans
from qarl_kernels import launch as launching
from qarl_kernels.direct import Descriptor
from qarl_kernels.launch import launch, recording
from qarl_kernels.plans import planned, unplanned
from torch import Tensor
from triton.runtime.jit import JITFunction


def _function(x, y, out, rows, factor, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), tl.load(x + tl.arange(0, BLOCK)) * factor)


@pytest.fixture(autouse=True)
def compiled(runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels go the way of compiled ones."""
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(launching, "_direct", {})
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


class Scaled:
    """A function that launches a kernel once, and how often it was asked."""

    def __init__(self, describe: bool = False) -> None:
        self.kernel, self.asked, self.describe = JITFunction(_function), 0, describe
        self.run = planned(self._run)

    def _run(self, x: Tensor, y: Tensor | None, factor: float, dtype: torch.dtype | None = None) -> Any:
        self.asked += 1
        if x.ndim != 2:
            raise ValueError("x must be a matrix")
        out, total = torch.empty_like(x, dtype=dtype), torch.empty(len(x), dtype=torch.float32)
        given = Descriptor(x, (16, 16)) if self.describe else x
        launch(self.kernel, (len(x), 2), num_warps=2, x=given, y=y, out=out, rows=len(x), factor=factor, BLOCK=16)
        launch(self.kernel, (1,), x=out, y=y, out=total, rows=len(x), factor=factor, BLOCK=16)
        return x, out, None, total


def matrix(rows: int = 32, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(rows, 64, dtype=dtype)


def address(given: Any) -> int:
    """Of a tensor, a descriptor's tensor, or what is an address already."""
    given = getattr(given, "base", given)
    return given.data_ptr() if isinstance(given, Tensor) else given


def passed(runs: list[Any], count: int) -> list[Any]:
    """What the last launches ran, and all they were given."""
    return [(compiled, given) for compiled, given in runs[-count:]]


@pytest.mark.parametrize("describe", [False, True])
def test_a_plan_launches_what_the_function_does(runs, describe: bool) -> None:
    scaled = Scaled(describe)
    first, y = matrix(), matrix()
    scaled.run(first, y, 0.5)
    for x in (matrix(), matrix(), first):
        same, out, nothing, total = scaled.run(x, y, 0.5)
        assert scaled.asked == 1 and same is x and nothing is None
        assert (out.shape, out.dtype, total.shape, total.dtype) == ((32, 64), x.dtype, (32,), torch.float32)
        by_plan = passed(runs, 2)
        for launched, tensors in zip(by_plan, [(x, y, out), (out, y, total)], strict=True):
            assert list(map(address, launched[1][9:12])) == list(map(address, tensors))
        scaled._run(x, y, 0.5)
        scaled.asked -= 1
        for mine, theirs in zip(by_plan, passed(runs, 2), strict=True):
            assert mine[0] is theirs[0] and mine[1][:9] == theirs[1][:9] and mine[1][12:] == theirs[1][12:]


def test_what_a_launch_may_depend_on_has_a_plan_of_its_own() -> None:
    scaled, x, y = Scaled(), matrix(), matrix()
    odd = torch.zeros(32 * 64 + 1, dtype=x.dtype)[1:].view(32, 64)
    wide = torch.zeros(32, 128, dtype=x.dtype)[:, :64]
    kinds = [
        *((x, y, 0.5), (x, None, 0.5), (x, y, 0.25), (x, y, 1.0), (x, y, 1), (x, y, True), (x, y, 0.0), (x, y, -0.0)),
        *((matrix(16), y, 0.5), (matrix(dtype=torch.float16), y, 0.5), (odd, y, 0.5), (wide, y, 0.5), (x, odd, 0.5)),
        *((x, y, 0.5, torch.float16), (x, y, 0.5, None)),
    ]
    for turn in range(2):
        for kind in kinds:
            scaled.run(*kind)
            assert scaled.run(*kind)[1].dtype == (kind[3] if len(kind) > 3 and kind[3] else kind[0].dtype)
        scaled.run(x, y, factor=0.5)
        scaled.run(x, factor=0.5, y=y)
        assert scaled.asked == len(kinds) + 2, turn


def test_errors_are_raised_every_time() -> None:
    scaled = Scaled()
    for _ in range(3):
        with pytest.raises(ValueError, match="matrix"):
            scaled.run(matrix()[0], None, 0.5)
    assert scaled.asked == 3


def test_a_tensor_that_is_two_arguments_makes_no_plan_and_takes_one(runs) -> None:
    scaled, x = Scaled(), matrix()
    for _ in range(2):
        scaled.run(x, x, 0.5)
    assert scaled.asked == 2
    y = matrix()
    scaled.run(y, x, 0.5)
    scaled.run(x, y, 0.5)
    assert runs[-2][1][9:11] == (x.data_ptr(), y.data_ptr())
    scaled.run(y, y, 0.5)
    assert runs[-2][1][9:11] == (y.data_ptr(), y.data_ptr()) and scaled.asked == 3


def copied(kernel: JITFunction, x: Tensor) -> Tensor:
    out = torch.empty(x.shape)
    launch(kernel, (1,), x=x.clone(), y=None, out=out, rows=1, factor=1.0, BLOCK=16)
    return out


def otherwise(kernel: JITFunction, x: Tensor) -> Tensor:
    out = x + 1
    unplanned()
    launch(kernel, (1,), x=x, y=None, out=out, rows=1, factor=1.0, BLOCK=16)
    return out


def transposed(kernel: JITFunction, x: Tensor) -> Tensor:
    out = torch.empty(64, 32).t()
    launch(kernel, (1,), x=x, y=None, out=out, rows=1, factor=1.0, BLOCK=16)
    return out


def of_another_kind(kernel: JITFunction, x: Tensor) -> Tensor:
    out = torch.empty(x.shape)
    launch(kernel, (1,), x=x, y=None, out=out, rows=2**63, factor=1.0, BLOCK=16)
    return out


@pytest.mark.parametrize("function", [copied, otherwise, transposed, of_another_kind])
def test_what_no_plan_repeats_is_run(function: Callable[..., Tensor]) -> None:
    kernel, asked = JITFunction(_function), []
    run = planned(lambda x: asked.append(1) or function(kernel, x))
    for _ in range(3):
        run(matrix())
    assert len(asked) == 3


def test_other_arguments_are_none_of_a_plan() -> None:
    asked: list[Any] = []
    run = planned(lambda *given: asked.append(given))
    for _ in range(2):
        run(matrix(), (1, 2))
        run(SimpleNamespace())
        run(3)
    assert len(asked) == 6


def test_a_function_inside_another_belongs_to_that_one_s_plan(runs) -> None:
    inner, asked = Scaled(), []
    outer = planned(lambda x: (asked.append(1), inner.run(x, None, 0.5)[1:])[1])
    for _ in range(3):
        out, nothing, total = outer(matrix())
    assert len(asked) == inner.asked == 1 and nothing is None
    assert [given[11] for _, given in runs[-2:]] == [out.data_ptr(), total.data_ptr()]


def test_nothing_is_planned_where_nothing_runs_or_a_hook_or_another_device_wants_to_know(monkeypatch) -> None:
    scaled, x = Scaled(), matrix()
    scaled.run(x, None, 0.5)
    with recording() as launches:
        scaled.run(x, None, 0.5)
    assert len(launches) == 2 and scaled.asked == 2
    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(seen := lambda metadata: None)
    try:
        scaled.run(x, None, 0.5)
    finally:
        hooks.remove(seen)
    scaled.run(x, None, 0.5)
    assert scaled.asked == 3
    monkeypatch.setattr(direct, "current_device", lambda: 1)
    scaled.run(x, None, 0.5)
    assert scaled.asked == 4


def test_a_plan_keeps_no_tensor_and_plans_are_not_kept_without_end(runs, monkeypatch) -> None:
    scaled, x = Scaled(describe=True), matrix()
    given = weakref.ref(x)
    scaled.run(x, None, 0.5)
    del x
    runs.clear()  # has descriptors
    gc.collect()
    scaled.run(matrix(), None, 0.5)
    gc.collect()
    assert scaled.asked == 1 and given() is None
    monkeypatch.setattr(plans, "KEPT_PLANS", 2)
    for rows in (8, 12, 20, 8):
        scaled.run(matrix(rows), None, 0.5)
    assert scaled.asked == 5  # the plans of the first rows went with the third ones
