"""The products as one operator, `torch.ops.qarl.linear`, which torch.compile and CUDA graphs of vLLM take as it is."""

from __future__ import annotations

from qarl_formats.registry import scheme_class
from torch import Tensor
from torch.library import custom_op


@custom_op("qarl::linear", mutates_args=())
def linear(
    x: Tensor, operands: list[Tensor], names: str, scheme: str, out_features: int, bias: Tensor | None, kernels: bool
) -> Tensor:
    """`qarl_formats.scheme.Scheme.multiply` of the scheme called `scheme`.

    x: (M, K) of the compute dtype. operands, names: the weight as the product reads it, and the operands' names with
    commas between them. bias: (N,) or None. kernels: by Triton. Returns (M, N) of x's dtype.
    """
    weight = dict(zip(names.split(","), operands, strict=True))
    return scheme_class(scheme).multiply(x, weight, out_features, bias, kernels)


@linear.register_fake
def _(x, operands, names, scheme, out_features, bias, kernels):
    return x.new_empty(x.shape[0], out_features)
