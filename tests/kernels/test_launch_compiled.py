"""Launches of compiled kernels: each runs the specialization that Triton's binder chooses, without asking it again.

Triton's own binder runs over a driver and a compiler that only record, so no GPU is used.
"""

import itertools
from contextlib import nullcontext
from typing import Any

import torch
import triton.language as tl
from qarl_kernels import launch as launching
from qarl_kernels.ahead import compile_ahead
from qarl_kernels.launch import launch, tma_descriptor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

OPTIONS = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False}
X = torch.zeros(64, dtype=torch.bfloat16)
MATRIX = torch.zeros(64, 64, dtype=torch.bfloat16)
KINDS = {
    "x": [
        *(X, X[1:], X[8:], X.float(), X.view(torch.int16), torch.nn.Parameter(X), None, X[:0]),
        *(tma_descriptor(one, (rows, 16)) for one, rows in ((MATRIX, 32), (MATRIX, 16), (MATRIX.half(), 16))),
    ],
    "count": [0, 1, 2, 16, 17, -1, -16, 2**31 - 1, 2**31, 2**31 + 1, 2**32, -(2**31), -(2**31) - 1, True, False, None],
    "scale": [0.0, 1.0, 1, None],
    "BLOCK": [32, 64],
    "KIND": [True, False, 1, 0, 1.0, 0.0, "w", None, tl.float32, tl.int32],
}


def _function(x, y, count, scale, BLOCK: tl.constexpr, KIND: tl.constexpr):
    tl.store(y + tl.arange(0, BLOCK), tl.load(x + tl.arange(0, BLOCK)) * scale)


class Counted:
    """A kernel, and how often Triton's own way was taken."""

    def __init__(self) -> None:
        self.kernel, self.asked = JITFunction(_function), 0
        self.params, self.arg_names = self.kernel.params, self.kernel.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.asked += 1
        return self.kernel[grid]


def arguments(**other: Any) -> dict[str, Any]:
    return {"x": X, "y": X, "count": 48, "scale": 0.5, "BLOCK": 32, "KIND": True} | other


def test_the_compiled_kernel_is_the_one_that_triton_s_binder_chooses(runs) -> None:
    counted = Counted()
    changes = [{name: value} for name, values in KINDS.items() for value in values]
    changes += [
        {"count": count, "scale": scale, "x": x}
        for count, scale, x in itertools.product([1, 16, True], [1, 1.0], [X, X[1:]])
    ]
    for turn in range(3):
        counted.asked = 0
        for change, warps in itertools.product(changes, (4, 8)):
            given = arguments(**change)
            counted.kernel[(2,)](**given, **OPTIONS | {"num_warps": warps})
            expected, _ = runs[-1]
            launch(counted, (2,), num_warps=warps, **given)
            chosen, passed = runs[-1]
            assert chosen is expected, change
            assert passed[:6] == (2, 1, 1, 7, expected.function, expected.packed_metadata)
            assert all(map(_passed, passed[9:], given.values()))
        assert (counted.asked > 0) == (turn == 0)


def _passed(value: Any, given: Any) -> bool:
    if isinstance(given, TensorDescriptor):
        return value is given
    return value is given or value == (given.data_ptr() if isinstance(given, torch.Tensor) else given)


def test_each_kernel_is_compiled_ahead_once_and_nothing_runs(runs, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    counted = Counted()

    def launches() -> None:
        for change in ({}, {"count": 64}, {"BLOCK": 64}):
            launch(counted.kernel, (1,), **arguments(**change))

    assert compile_ahead(launches, torch.device("cpu"), 2) == 2 and runs == []


def test_tensors_of_another_device_go_through_triton_on_that_device(runs, monkeypatch) -> None:
    counted, switched = Counted(), []
    other = torch.zeros(64, dtype=torch.bfloat16)
    monkeypatch.setattr(launching, "device_index", lambda tensor: int(tensor is other))
    monkeypatch.setattr(torch.cuda, "device", lambda device: switched.append(device) or nullcontext())
    for _ in range(2):
        launch(counted, (1,), **arguments(x=other, y=other))
    assert counted.asked == 2 and switched == [1] * 2
    for _ in range(2):
        launch(counted, (1,), **arguments())
    launch(counted, (1,), **arguments(y=other))
    assert counted.asked == 4
