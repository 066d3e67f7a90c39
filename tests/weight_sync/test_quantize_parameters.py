"""All masters at once: the snapshot and the errors of single masters, with one synchronization."""

from collections import Counter

import pytest
import torch
from qarl_formats.registry import make_scheme, scheme_names
from qarl_formats.rows import adjacent
from qarl_kernels.launch import INTERPRETED
from torch import Tensor

from qarl.distributed.exchange import SingleProcessExchange
from qarl.distributed.rows import plan_of
from qarl.errors import UserError
from qarl.training.updates import LazyValues
from qarl.utils.packed_linears import shared_scales
from qarl.weight_sync.codes import quantize_parameters
from qarl.weight_sync.quantize import quantize_parameter
from qarl.weight_sync.snapshot import Snapshot, build_snapshot

SHAPES = {
    "model.embed_tokens.weight": (13, 64),
    "model.layers.0.mlp.up_proj.weight": (24, 64),
    "model.layers.0.mlp.up_proj.bias": (24,),
    "model.layers.0.mlp.down_proj.weight": (16, 128),
    "model.norm.weight": (64,),
    "model.nothing.weight": (0, 4),
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
runs_kernels = pytest.mark.skipif(not INTERPRETED and DEVICE.type == "cpu", reason="needs a GPU or TRITON_INTERPRET=1")
KERNELS = [False, pytest.param(True, marks=runs_kernels)]


def masters() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(DEVICE) for name, shape in SHAPES.items()}


def scheme_of(scheme: str):
    made = make_scheme(scheme, 32 if scheme.startswith("w4") else None)
    return lambda name: made if made.quantized and name.endswith("_proj.weight") else None


def together(values: dict[str, Tensor], of, kernels: bool = False) -> Snapshot:
    plan = plan_of({name: value.shape for name, value in values.items()}, of, 1)
    return quantize_parameters(values, plan, of, torch.bfloat16, 3, kernels)


def one_by_one(values: dict[str, Tensor], of, kernels: bool = False, scales: bool = True) -> Snapshot:
    modules = [name.removesuffix(".weight") for name in values if scales and of(name) is not None]
    shared = shared_scales(modules, of(f"{modules[0]}.weight"), values.__getitem__) if modules else {}
    how = torch.bfloat16, 3, kernels
    forms = ((name, quantize_parameter(name, v, of(name), *how, shared.get(name))) for name, v in values.items())
    return build_snapshot(3, forms)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("scheme", scheme_names())
def test_the_snapshot_equals_that_of_single_masters(scheme: str, kernels: bool) -> None:
    values, of = masters(), scheme_of(scheme)
    found, expected = together(values, of, kernels), one_by_one(values, of, kernels)
    assert found.version == 3 and list(found.tensors) == list(expected.tensors)
    assert found.manifest() == expected.manifest()
    assert {name: (w.scheme, w.shape) for name, w in found.weights.items()} == {
        name: (w.scheme, w.shape) for name, w in expected.weights.items()
    }
    for name, value in masters().items():
        assert torch.equal(values[name], value)
        if name in found.tensors and value.numel():
            assert found.tensors[name].data_ptr() != values[name].data_ptr()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("first", ["model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"])
def test_the_first_master_that_is_not_finite_is_named(first: str, kernels: bool) -> None:
    values, of = masters(), scheme_of("w4a16")
    for name in list(SHAPES)[list(SHAPES).index(first) : -1]:
        values[name].view(-1)[1] = torch.nan
    with pytest.raises(UserError, match=f"quantize version 3: {first}") as refused:
        together(values, of, kernels)
    with pytest.raises(UserError) as apart:
        one_by_one(values, of, kernels)
    assert str(refused.value) == str(apart.value)


def experts(inner: int = 16, count: int = 4) -> tuple[dict[str, Tensor], list[list[str]]]:
    """Masters of a layer's experts as they are loaded, under one another in memory, and the names of its two stacks."""
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(count * 2 * inner, 32, generator=generator).to(DEVICE).split(inner)
    down = torch.randn(count * inner, 32, generator=generator).to(DEVICE).split(inner)
    leaves = ("gate", "up", "down")
    names = [f"model.layers.0.mlp.experts.{i}.{leaf}_proj.weight" for i in range(count) for leaf in leaves]
    stacks = [[name for name in names if "down" not in name], [name for name in names if "down" in name]]
    values = dict(zip(stacks[0], gate_up, strict=True)) | dict(zip(stacks[1], down, strict=True))
    return {name: values[name] for name in names}, stacks


@pytest.mark.parametrize(
    ("scheme", "kernels"),
    [(name, False) for name in scheme_names()] + [pytest.param("w4a16", True, marks=runs_kernels)],
)
def test_adjacent_masters_are_quantized_at_once_to_the_same_bits(scheme: str, kernels: bool) -> None:
    (values, stacks), of = experts(128 if scheme == "fp8_block" else 16), scheme_of(scheme)
    made, found, expected = of(next(iter(values))), together(values, of, kernels), one_by_one(values, of, kernels)
    assert list(found.tensors) == list(expected.tensors)
    assert found.manifest() == expected.manifest()
    for stack in stacks:
        for suffix in ["weight"] if made is None else made.tensor_specs(*values[stack[0]].shape):
            if made is None or made.rows_per_entry(suffix) is not None:
                assert adjacent([found.tensors[f"{name.removesuffix('.weight')}.{suffix}"] for name in stack])


@pytest.mark.parametrize("scheme", ["w4a16", "nvfp4a16"])
def test_one_process_reads_a_master_again_only_for_a_scale_that_it_shares(scheme: str, monkeypatch) -> None:
    names = [f"model.layers.0.self_attn.{leaf}_proj.weight" for leaf in "qkvo"]
    values, reads = experts()[0] | {name: torch.randn(24, 128, device=DEVICE) for name in names}, Counter[str]()
    monkeypatch.delattr(SingleProcessExchange, "begin_gathers")  # it would copy the stored tensors
    together(LazyValues(values, lambda name: reads.update([name]) or values[name]), scheme_of(scheme))
    alone = {names[3]} if scheme == "nvfp4a16" else values
    assert reads == {name: 1 + 1 + (name not in alone) for name in values}  # once for its shape


@pytest.mark.parametrize("scheme", scheme_names())
def test_packed_linears_are_one_weight_whose_parts_are_the_snapshots_tensors(scheme: str) -> None:
    made, rows = scheme_of(scheme), 128 if scheme == "fp8_block" else 24
    names = [f"model.layers.0.self_attn.{leaf}_proj" for leaf in "qkvo"]
    values = {f"{name}.weight": torch.randn(rows, 128) for name in names}
    found = together(values, made)
    ((group, whole),) = found.groups.items()
    assert group == tuple(names[:3]) and whole.shape == (3 * rows, 128) and found.packed(group) == [whole]
    for name, part in zip(group, whole.split([rows] * 3), strict=True):
        for suffix, tensor in part.tensors.items():
            stored = found.tensors[f"{name}.{suffix}"]
            assert torch.equal(stored.view(torch.uint8), tensor.view(torch.uint8))
            assert stored is found.weight(name).tensors[suffix]
            if whole.scheme.rows_per_entry(suffix) is not None:
                assert stored.data_ptr() == tensor.data_ptr()
    assert [weight.shape for weight in found.packed((names[3],))] == [(rows, 128)]


@pytest.mark.parametrize(("scheme", "rows"), [("fp8_block", 64), ("nvfp4a16", 64)])
def test_weights_that_share_rows_or_differ_in_their_global_scale_stay_apart(scheme: str, rows: int) -> None:
    names = tuple(f"model.layers.0.mlp.{leaf}_proj" for leaf in ("gate", "up"))
    values = {f"{name}.weight": (place + 1) * torch.randn(rows, 64) for place, name in enumerate(names)}
    found = one_by_one(values, scheme_of(scheme), scales=False)
    assert not found.groups and [weight.shape for weight in found.packed(names)] == [(rows, 64)] * 2
