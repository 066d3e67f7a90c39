"""Codes gathered from rows of several ranks: the snapshot of one process to the bit, and its errors on every rank.

Every rank makes all masters, quantizes its own rows of them, and gathers the codes.
"""

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from qarl_formats.registry import make_scheme, scheme_names
from qarl_formats.rows import adjacent
from qarl_formats.scheme import Scheme
from ranks import run_ranks
from test_exchange import exchange_of
from torch import Tensor

from qarl.distributed.group import Group
from qarl.distributed.rows import RowPlan, row_unit, stacked_experts
from qarl.errors import UserError
from qarl.utils.packed_linears import shared_scales
from qarl.weight_sync import gathers
from qarl.weight_sync.codes import gather_codes
from qarl.weight_sync.quantize import quantize_parameter
from qarl.weight_sync.snapshot import Snapshot, build_snapshot

SCHEMES = {
    "bf16": make_scheme("bf16"),
    "w8a8": make_scheme("w8a8"),
    "fp8": make_scheme("fp8", scale_dtype="float32"),
    "fp8_block": make_scheme("fp8_block"),
    "nvfp4a16": make_scheme("nvfp4a16"),
    "w4a8 g32": make_scheme("w4a8", 32),
    "w4a8 channel": make_scheme("w4a8", -1),
    "w4a16 g32": make_scheme("w4a16", 32),
    "w4a16 g64": make_scheme("w4a16", 64, grid="symmetric7"),
    "w4a16 g128": make_scheme("w4a16", 128),
    "w4a16 channel": make_scheme("w4a16", -1),
    "w4a16 g32 asymmetric": make_scheme("w4a16", 32, symmetric=False),
    "w4a16 g128 asymmetric": make_scheme("w4a16", 128, symmetric=False, scale_dtype="float16"),
    "w4a16 channel asymmetric": make_scheme("w4a16", -1, symmetric=False),
}
assert {scheme.name for scheme in SCHEMES.values()} == set(scheme_names())
IN_PIECES = ["bf16", "fp8_block", "nvfp4a16", "w4a16 g32 asymmetric"]
BY_KERNELS = ["nvfp4a16", "w4a16 g32 asymmetric"]  # on few numbers: Triton's interpreter is slow


def shapes_of(scheme: Scheme, few: bool = False) -> dict[str, tuple[int, ...]]:
    """Shapes of two layers with odd and even sizes, so that some of three ranks have no rows; few: of two weights."""
    if few:
        return {f"model.layers.0.mlp.{which}_proj.weight": (rows, 32) for which, rows in (("gate", 17), ("up", 24))}
    free = scheme.group_size is None and scheme.name != "nvfp4a16"
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (13, 64)}
    for layer, (hidden, query, key, wide) in enumerate([(128, 24, 8, 300), (37 if free else 256, 96, 17, 48)]):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        shapes |= {
            f"{attention}.q_proj.weight": (query, hidden),
            f"{attention}.q_proj.bias": (query,),
            f"{attention}.k_proj.weight": (key, hidden),
            f"{attention}.v_proj.weight": (key, hidden),
            f"{attention}.o_proj.weight": (hidden, 128),
            f"{mlp}.gate_proj.weight": (wide, hidden),
            f"{mlp}.up_proj.weight": (wide, hidden),
            f"{mlp}.down_proj.weight": (hidden, 256),
            f"model.layers.{layer}.input_layernorm.weight": (hidden,),
        }
    rows = 384 if scheme.row_block > 1 else 48  # on three ranks a cut goes through gate, up and down of an expert
    for expert in (f"model.layers.2.mlp.experts.{index}" for index in range(4)):
        shapes |= {f"{expert}.{leaf}_proj.weight": (rows, 128) for leaf in ("gate", "up")}
        shapes[f"{expert}.down_proj.weight"] = (256, 128)
    return shapes | {"model.norm.weight": (1,), "model.nothing.weight": (0, 4)}


def masters_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if "model.layers.1.mlp.down_proj.weight" not in shapes:
        return found
    found["model.layers.1.mlp.down_proj.weight"].zero_()  # its global scale is that of zeros
    found["model.layers.0.self_attn.v_proj.weight"][-1] *= 50  # rows of the last rank determine a shared scale
    return found


def scheme_by_name(scheme: Scheme) -> Callable[[str], Scheme | None]:
    return lambda name: scheme if scheme.quantized and name.endswith("_proj.weight") else None


def whole(masters: dict[str, Tensor], scheme: Scheme) -> Snapshot:
    """The snapshot of single masters, in plain torch."""
    of = scheme_by_name(scheme)
    modules = [name.removesuffix(".weight") for name in masters if of(name) is not None]
    shared = shared_scales(modules, scheme, masters.__getitem__)
    how = torch.bfloat16, 5, False
    forms = ((name, quantize_parameter(name, m, of(name), *how, shared.get(name))) for name, m in masters.items())
    return build_snapshot(5, forms)


class Gathering:
    """The rows of one rank, and the snapshot that it gathers."""

    def __init__(self, group: Group | None, scheme: Scheme, shapes: dict[str, tuple[int, ...]]) -> None:
        self.exchange, self.of = exchange_of(group), scheme_by_name(scheme)
        stacks = stacked_experts(shapes, self.of)
        self.plan = RowPlan(shapes, lambda name: row_unit(self.of(name)), self.exchange.count, stacks)

    def of_masters(self, masters: dict[str, Tensor], kernels: bool) -> Snapshot:
        rows = {name: self.plan.cut(name)[self.exchange.rank] for name in masters}
        shards = {name: master[rows[name].start : rows[name].stop].clone() for name, master in masters.items()}
        kept = {name: shard.clone() for name, shard in shards.items()}
        found = gather_codes(shards, self.plan, self.exchange, self.of, torch.bfloat16, 5, kernels)
        assert all(torch.equal(shards[name], kept[name]) for name in shards)
        return found

    def in_pieces(self, masters: dict[str, Tensor]) -> Snapshot:
        """As `of_masters`, but with few rows of a stack at a time and few tensors per message."""
        with patch.object(gathers, "RUN_BYTES", 10_000), patch.object(gathers, "MESSAGE_BYTES", 10_000):
            return self.of_masters(masters, False)


def digests(group: Group | None) -> list[tuple[str, int, int]]:
    """Check the snapshots of all schemes; returns (label, bytes received, bytes of the snapshot) of each."""
    done = []
    cases = [(label, False) for label in SCHEMES]
    if os.environ.get("TRITON_INTERPRET") == "1":
        cases += [(label, True) for label in BY_KERNELS]
    for label, kernels in cases:
        scheme = SCHEMES[label]
        shapes = shapes_of(scheme, few=kernels)
        masters, gathering = masters_of(shapes), Gathering(group, scheme, shapes)
        found, expected = gathering.of_masters(masters, kernels), whole(masters, scheme)
        assert found.version == 5 and list(found.tensors) == list(expected.tensors), label
        for name, tensor in expected.tensors.items():
            same = found.tensors[name].dtype == tensor.dtype and found.tensors[name].shape == tensor.shape
            assert same and found.tensors[name].is_contiguous(), (label, name)
        assert found.manifest() == expected.manifest(), (label, kernels)
        assert found.manifest().digest() == expected.manifest().digest()
        for name, weight in expected.weights.items():
            other = found.weights[name]
            assert (other.scheme, other.shape) == (weight.scheme, weight.shape), (label, name)
            assert all(other.tensors[suffix] is found.tensors[f"{name}.{suffix}"] for suffix in weight.tensors)
        once, again = getattr(gathering.exchange, "parts", 0), found
        if in_pieces := label in IN_PIECES and not kernels:
            again = gathering.in_pieces(masters)
            assert gathering.exchange.count == 1 or gathering.exchange.parts > 10 * once, label
        assert again.manifest() == expected.manifest(), label
        for names in stacked_experts(shapes, gathering.of):
            forms = [again.weights.get(name.removesuffix(".weight")) for name in names]
            stored = [
                again.tensors[name] if form is None else next(iter(form.tensors.values()))
                for name, form in zip(names, forms, strict=True)
            ]
            assert adjacent(stored), label
        gathered = [name for name in found.tensors if not name.endswith(("_shape", "_global_scale"))]
        sizes = sum(found.tensors[name].nbytes for name in gathered)
        done.append((label, getattr(gathering.exchange, "received", 0), (1 + in_pieces) * sizes))
    return done


def errors_of(group: Group | None) -> list[str]:
    """The errors for masters that are not finite on this rank, checked against one process."""
    said = []
    places = {
        "model.layers.0.self_attn.q_proj.bias": 0,
        "model.layers.1.self_attn.k_proj.weight": -1,
        "model.layers.2.mlp.experts.1.up_proj.weight": 17,
        "model.norm.weight": 0,
    }
    large = 3.4e38  # infinite in 16 bits
    cases = [("w4a16 g32", torch.nan, first) for first in range(len(places))]
    for label, value, first in [*cases, ("w4a16 g32", large, 1), ("nvfp4a16", torch.nan, 0), ("bf16", -torch.inf, 0)]:
        scheme = SCHEMES[label]
        shapes = shapes_of(scheme)
        masters, gathering = masters_of(shapes), Gathering(group, scheme, shapes)
        for name in list(places)[first:]:
            masters[name][places[name]] = value
        found = _message(gathering.of_masters, masters, False)
        assert found == _message(whole, masters, scheme), (label, value, first)
        said.append(found)
    scheme = SCHEMES["w4a16 g128"]
    unfit = {"model.layers.0.self_attn.o_proj.weight": (128, 100)}
    return [*said, _message(lambda: Gathering(group, scheme, unfit).of_masters(masters_of(unfit), False))]


def _message(make: Callable[..., Snapshot], *arguments: Any) -> str:
    try:
        made = make(*arguments)
    except UserError as error:
        return str(error)
    return f"digest {made.manifest().digest()}"


@pytest.mark.parametrize("count", [0, 3])
def test_every_rank_has_the_snapshot_of_one_process(count: int) -> None:
    done = run_ranks(count, f"{__file__}:digests") if count else [digests(None)]
    for cases in zip(*done, strict=True):
        label, _, size = cases[0]
        received = sum(received for _, received, _ in cases)
        assert size * (len(done) - 1) <= received <= 1.3 * size * (len(done) - 1), label
    assert {label for label, _, _ in done[0]} == set(SCHEMES)


@pytest.mark.parametrize("count", [0, 3])
def test_all_ranks_report_the_same_masters_that_are_not_finite(count: int) -> None:
    said = run_ranks(count, f"{__file__}:errors_of") if count else [errors_of(None)]
    assert all(one == said[0] for one in said)
    assert len(said[0]) == 8 and all(line.startswith("quantize version 5: model.") for line in said[0])
    assert "k_proj.weight: 256 of 4352 values are NaN or infinite and cannot be quantized" in said[0][1]
    assert "experts.1.up_proj.weight: 128 of 6144 values are NaN or infinite" in said[0][2]
    assert "norm.weight: 1 of 1 values are NaN or infinite in torch.bfloat16" in said[0][3]
    assert "o_proj.weight: group_size 128" in said[0][-1]
