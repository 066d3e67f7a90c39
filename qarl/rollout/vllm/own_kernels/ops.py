"""The products as operators of vLLM's, `torch.ops.qarl.linear` and `.experts`: torch.compile takes them as they are."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from qarl_formats.registry import scheme_class
from qarl_formats.scheme import Scheme
from qarl_kernels import pointwise
from qarl_kernels.moe.groups import Groups
from qarl_kernels.moe.reference import combine, groups_of
from torch import Tensor
from torch.library import custom_op


@custom_op("qarl::linear", mutates_args=())
def linear(
    x: Tensor, operands: list[Tensor], names: str, scheme: str, out_features: int, bias: Tensor | None, kernels: bool
) -> Tensor:
    """`qarl_formats.scheme.Scheme.matmul` of the scheme called `scheme`.

    x: (M, K) of the compute dtype. operands, names: the weight as the product reads it, and the operands' names with
    commas between them. bias: (N,) or None. kernels: by Triton. Returns (M, N) of x's dtype.
    """
    weight = dict(zip(names.split(","), operands, strict=True))
    return scheme_class(scheme)().matmul(x, weight, out_features, bias, kernels)


@linear.register_fake
def _(x, operands, names, scheme, out_features, bias, kernels):
    return x.new_empty(x.shape[0], out_features)


@custom_op("qarl::experts", mutates_args=())
def experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: list[Tensor],
    gate_up_names: str,
    down: list[Tensor],
    down_names: str,
    scheme: str,
    count: int,
    inner: int,
    kernels: bool,
) -> Tensor:
    """A layer's experts, weighted and added up as `qarl.policy.mixture` does it.

    x: (T, H) of the compute dtype. weights, ids: (T, k) of each token's experts, in any order. gate_up, down: operands
    of the stacks (count * 2 * inner, H) and (count * H, inner), named as in `linear`. Returns (T, H).
    """
    chosen, slots = ids.long().sort(dim=-1)
    weights = weights.float().gather(1, slots)
    kind = scheme_class(scheme)()  # the operands know the rest
    wide = dict(zip(gate_up_names.split(","), gate_up, strict=True))
    narrow = dict(zip(down_names.split(","), down, strict=True))
    if kernels:
        from qarl_kernels.moe import dispatch  # imports Triton, which the CPU does not need
        from qarl_kernels.moe.combine import combine as combine_by_kernel
        from qarl_kernels.swiglu import swiglu

        groups = dispatch.groups_of(chosen, count, kernels=True)
        both = kind.matmul(x, wide, 2 * inner, None, True, groups, True)
        product = swiglu(both).product
        assert product is not None, "it was asked for"
        return combine_by_kernel(kind.matmul(product, narrow, x.shape[1], None, True, groups), weights, groups)
    groups = groups_of(chosen, count)
    return combine(_one_by_one(kind, x, wide, narrow, groups, inner), weights, groups)


def _one_by_one(
    kind: Scheme, x: Tensor, wide: Mapping[str, Tensor], narrow: Mapping[str, Tensor], groups: Groups, inner: int
) -> Tensor:
    """What each expert gives for its rows, (R, H) in sorted order; gate and up apart, in the learner's shapes."""
    count, hidden = groups.experts, x.shape[1]
    halves, downs = kind.parts(wide, [inner] * (2 * count)), kind.parts(narrow, [hidden] * count)
    starts, tokens = groups.starts.tolist(), groups.order.long() // groups.slots
    found = []
    for expert in range(count):
        rows = x[tokens[starts[expert] : starts[expert + 1]]]
        if len(rows):
            gate, up = (kind.matmul(rows, part, inner, None, False) for part in halves[2 * expert : 2 * expert + 2])
            found.append(kind.matmul(pointwise.silu(gate) * up, downs[expert], hidden, None, False))
    return torch.cat(found)


@experts.register_fake
def _(x, weights, ids, gate_up, gate_up_names, down, down_names, scheme, count, inner, kernels):
    return torch.empty_like(x)
