"""`qarl_kernels.direct`: a launch past Triton's binder runs the compiled kernel that the binder would choose.

Triton's own binder is asked, over a driver and a compiler that only record: no GPU is needed, and none is used.
"""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from qarl_kernels import direct
from qarl_kernels import launch as launching
from qarl_kernels.direct import Descriptor, Direct
from qarl_kernels.launch import launch
from stub_driver import Compiled
from triton.runtime.jit import JITFunction

OPTIONS = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False}


def _function(x, y, count, scale, BLOCK: tl.constexpr, KIND: tl.constexpr):
    tl.store(y + tl.arange(0, BLOCK), tl.load(x + tl.arange(0, BLOCK)) * scale)


@pytest.fixture
def kernel() -> JITFunction:
    return JITFunction(_function)


def arguments(**other: Any) -> dict[str, Any]:
    x = torch.zeros(64, dtype=torch.bfloat16)
    return {"x": x, "y": x, "count": 48, "scale": 0.5, "BLOCK": 32, "KIND": True} | other


X = torch.zeros(64, dtype=torch.bfloat16)
MATRIX = torch.zeros(64, 64, dtype=torch.bfloat16)
KINDS = {
    "x": [
        *(X, X[1:], X[8:], X.float(), X.view(torch.int16), torch.nn.Parameter(X), None, X[:0]),
        *(Descriptor(MATRIX, (32, 16)), Descriptor(MATRIX, (16, 16)), Descriptor(MATRIX.half(), (16, 16))),
    ],
    "count": [0, 1, 2, 16, 17, -1, -16, 2**31 - 1, 2**31, 2**31 + 1, 2**32, -(2**31), -(2**31) - 1, True, False, None],
    "scale": [0.0, -0.0, 1.0, 1, None],
    "BLOCK": [32, 64],
    "KIND": [True, False, 1, 0, 1.0, 0.0, -0.0, "w", None, tl.float32, tl.int32],
}


def test_the_compiled_kernel_is_the_one_that_triton_s_binder_chooses(runs, kernel) -> None:
    known = Direct(kernel)
    made = []
    changes = [{name: value} for name, values in KINDS.items() for value in values]
    changes += [
        {"count": count, "scale": scale, "x": x}
        for count, scale, x in itertools.product([1, 16, True], [1, 1.0], [X, X[1:]])
    ]
    for turn in range(3):
        for change in changes:
            for warps in (4, 8):
                given, options = arguments(**change), OPTIONS | {"num_warps": warps}
                own = {name: value.made() if isinstance(value, Descriptor) else value for name, value in given.items()}
                kernel[(2,)](**own, **options)
                expected, _ = runs[-1]
                known.launch((2,), warps, 3, given, lambda g=own, o=options: made.append(1) or kernel[(2,)](**g, **o))
                chosen, passed = runs[-1]
                assert chosen is expected, change
                assert passed[:6] == (2, 1, 1, 7, expected.function, expected.packed_metadata)
                assert all(map(_passed, passed[9:], given.values()))
        if turn == 0:
            made.clear()
    assert not made  # after the first turn, all went past the binder


def _passed(value: Any, given: Any) -> bool:
    if isinstance(given, Descriptor):
        return value.base is given.base and value.block_shape == list(given.block_shape)
    return value is given or value == (given.data_ptr() if isinstance(given, torch.Tensor) else given)


def test_arguments_go_by_name_in_any_order(runs, kernel) -> None:
    known = Direct(kernel)
    given = arguments()
    backwards = dict(reversed(given.items()))
    for turn in (given, backwards):
        known.launch((1, 2, 3), 4, 3, turn, lambda: kernel[(1, 2, 3)](**given, **OPTIONS))
    assert runs[1][0] is runs[0][0] and runs[1][1][:3] == (1, 2, 3)
    assert runs[1][1][9:] == (given["x"].data_ptr(), given["y"].data_ptr(), 48, 0.5, 32, True)


def launches_of(known: Direct, given: dict[str, Any]) -> list[str]:
    """Whether each of two launches was an ordinary one."""
    seen = []
    for _ in range(2):
        seen.append("direct")

        def ordinary() -> Any:
            seen[-1] = "ordinary"
            return known.kernel[(1,)](**given, **OPTIONS)

        known.launch((1,), 4, 3, given, ordinary)
    return seen


def test_the_second_launch_goes_past_the_binder(runs, kernel) -> None:
    assert launches_of(Direct(kernel), arguments()) == ["ordinary", "direct"]


@pytest.mark.parametrize("change", [{"count": 2**63}, {"KIND": (1, 2)}], ids=str)
def test_arguments_of_other_kinds_go_the_ordinary_way(runs, kernel, change) -> None:
    assert launches_of(Direct(kernel), arguments(**change)) == ["ordinary", "ordinary"]


def test_a_tensor_of_the_host_goes_the_ordinary_way_which_refuses_it(runs, kernel, monkeypatch) -> None:
    known = Direct(kernel)
    launches_of(known, arguments())
    monkeypatch.setattr(direct, "device_index", torch.Tensor.get_device)
    assert launches_of(known, arguments()) == ["ordinary", "ordinary"]


def test_hooks_see_every_launch(runs, kernel, monkeypatch) -> None:
    known = Direct(kernel)
    launches_of(known, arguments())
    seen = []
    kernel.add_pre_run_hook(lambda *given, **options: seen.append(1))
    assert launches_of(known, arguments()) == ["ordinary", "ordinary"] and len(seen) == 2
    kernel.pre_run_hooks.clear()
    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(seen.append)
    try:
        assert launches_of(known, arguments()) == ["ordinary", "ordinary"]
    finally:
        hooks.remove(seen.append)
    assert launches_of(known, arguments()) == ["direct", "direct"]
    monkeypatch.setattr(triton.knobs.runtime, "launch_exit_hook", None)
    assert launches_of(known, arguments()) == ["direct", "direct"]
    monkeypatch.setattr(triton.knobs.runtime, "launch_exit_hook", seen.append)
    assert launches_of(known, arguments()) == ["ordinary", "ordinary"]


@pytest.mark.parametrize("missing", ["run", "function", "packed_metadata"])
def test_another_triton_s_kernels_are_launched_the_ordinary_way(runs, kernel, monkeypatch, missing) -> None:
    def compiled(*given: Any, **options: Any) -> Any:
        whole = Compiled(runs)
        parts = {name: value for name, value in vars(whole).items() if name != missing}
        return SimpleNamespace(**parts)

    given = arguments()
    known = Direct(kernel)
    count = []
    for _ in range(3):
        known.launch((1,), 4, 3, given, lambda: count.append(1) or compiled())
    assert len(count) == 3


def test_the_device_is_switched_where_it_is_another_one(runs, kernel, monkeypatch) -> None:
    known, switched = Direct(kernel), []

    class Switch:
        def __init__(self, device: int) -> None:
            switched.append(device)

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "device", Switch)
    launches_of(known, arguments())
    assert switched == []
    monkeypatch.setattr(direct, "device_index", lambda tensor: 1)
    launches_of(known, arguments())
    assert switched == [1]  # the second launch; the ordinary way's switch is its caller's
    assert runs[-1][0] is not None


def test_launch_reaches_a_kernel_past_the_binder(runs, kernel, monkeypatch) -> None:
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(launching, "_direct", {})
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    for _ in range(3):
        launch(kernel, [5], num_warps=2, **arguments())
    assert len({run[0] for run in runs}) == 1 and [run[1][0] for run in runs] == [5, 5, 5]
    assert isinstance(runs[0][1][9], torch.Tensor) and isinstance(runs[2][1][9], int)


def test_triton_3_6_s_own_launcher_gets_what_triton_would_pass_and_encodes_a_descriptor_once(monkeypatch) -> None:
    got, encoded = [], []

    def expand(value: Any, meta: str) -> list[Any]:
        encoded.append((value.base.data_ptr(), meta))
        return [f"map {meta}", *value.shape, *value.strides]

    def wrapped(metas: list[str | None]) -> Any:
        launcher, tensordesc_indices, tensordesc_meta = lambda *given: got.append(given), {0, 2}, metas

        def inner(*given: Any) -> None:
            raise AssertionError((launcher, tensordesc_indices, tensordesc_meta))

        return inner

    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(direct.nvidia, "make_tensordesc_arg", expand)
    monkeypatch.setattr(direct, "current_stream", lambda device: 7)
    run = SimpleNamespace(global_scratch_size=0, profile_scratch_size=0, launch_cooperative_grid=False, launch_pdl=True)
    compiled = SimpleNamespace(run=run, function=11, packed_metadata=(4, 1, 0))
    run.launch = wrapped([None, "second"])
    form = direct.Form(compiled, [0, 2])
    assert form.call is run  # what such a descriptor becomes has the tensor in it
    assert [type(one) for one in form.encoded] == [direct.Made, direct.Made]
    run.launch = wrapped(["first", "second"])
    form = direct.Form(compiled, [0, 2])
    left, right = Descriptor(MATRIX, (32, 16)), Descriptor(MATRIX[32:], (16, 16))
    for _ in range(2):
        form.start((3,), 0, [left, 5, right, 6])
    base = (3, 1, 1, 7, 11, False, True, None, None, (4, 1, 0), None, None, None)
    assert got == [(*base, "map first", 64, 64, 64, 1, 5, "map second", 32, 64, 64, 1, 6)] * 2
    assert sorted(encoded) == sorted([(MATRIX.data_ptr(), "first"), (MATRIX[32:].data_ptr(), "second")])


def test_a_matrix_that_no_accelerator_reads_is_refused_where_triton_sees_it(runs, monkeypatch) -> None:
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(launching, "_direct", {})
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    for wrong in (MATRIX[:, 1:], MATRIX.t(), torch.zeros(8, 60, dtype=torch.bfloat16)):
        with pytest.raises((AssertionError, ValueError)):
            launch(JITFunction(_function), [5], **arguments(x=Descriptor(wrong, (16, 16))))
    assert not runs
