"""Launches of compiled kernels: each runs the specialization that Triton's binder chooses, without asking it again.

Triton's own binder runs over a driver and a compiler that only record, so no GPU is used.
"""

import itertools
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from qarl_kernels import launch as launching
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


def test_arguments_go_by_name_in_any_order(runs) -> None:
    counted, given = Counted(), arguments()
    launch(counted, [1, 2, 3], **given)
    launch(counted, [1, 2, 3], **dict(reversed(given.items())))
    assert counted.asked == 1 and runs[1][0] is runs[0][0] and runs[1][1][:3] == (1, 2, 3)
    assert runs[1][1][9:] == (X.data_ptr(), X.data_ptr(), 48, 0.5, 32, True)


def test_hooks_see_every_launch(runs, monkeypatch) -> None:
    counted, seen = Counted(), []
    launch(counted, (1,), **arguments())
    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(seen.append)
    try:
        launch(counted, (1,), **arguments())
    finally:
        hooks.remove(seen.append)
    launch(counted, (1,), **arguments())
    assert counted.asked == 2
    monkeypatch.setattr(triton.knobs.runtime, "launch_exit_hook", None)
    launch(counted, (1,), **arguments())
    assert counted.asked == 2
    monkeypatch.setattr(triton.knobs.runtime, "launch_exit_hook", seen.append)
    launch(counted, (1,), **arguments())
    assert counted.asked == 3


@pytest.mark.parametrize("where", [-1, 1])
def test_tensors_of_another_device_go_through_triton_on_that_device(runs, monkeypatch, where: int) -> None:
    """Which refuses memory of the host (-1)."""
    counted, switched = Counted(), []
    other = torch.zeros(64, dtype=torch.bfloat16)
    monkeypatch.setattr(launching, "device_index", lambda tensor: where if tensor is other else 0)

    class Switch:
        def __init__(self, device: int) -> None:
            switched.append(device)

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "device", Switch)
    for _ in range(2):
        launch(counted, (1,), **arguments(x=other, y=other))
    assert counted.asked == 2 and switched == [where] * 2
    for _ in range(2):
        launch(counted, (1,), **arguments())
    launch(counted, (1,), **arguments(y=other))
    assert counted.asked == 4


def test_a_matrix_that_no_accelerator_reads_is_refused() -> None:
    for wrong in (MATRIX[:, 1:], MATRIX.t(), torch.zeros(8, 60, dtype=torch.bfloat16)):
        with pytest.raises((AssertionError, ValueError)):
            tma_descriptor(wrong, (16, 16))
