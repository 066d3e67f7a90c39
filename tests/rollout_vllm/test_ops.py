"""The operator `torch.ops.qarl.linear` of every scheme: registration, torch.compile, and the prepared weight's bits."""

from __future__ import annotations

import pytest
import torch
from qarl_formats.registry import make_scheme, scheme_names
from qarl_formats.weight import LowBitWeight, quantize_weight
from torch import Tensor

from qarl.rollout.vllm.own_kernels.ops import linear

N, K = 40, 96


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _weight(name: str, dtype: torch.dtype) -> LowBitWeight:
    scheme = make_scheme(name, 32 if make_scheme(name).group_sizes else None)
    master = _random(N, K, seed=2)
    quantized = scheme.quantized
    return (quantize_weight(master, scheme, "w") if quantized else LowBitWeight.of_values(master.to(dtype))).prepare(
        dtype
    )


def _call(weight: LowBitWeight, x: Tensor, bias: Tensor | None) -> Tensor:
    operands = weight.operands
    return linear(x, list(operands.values()), ",".join(operands), weight.scheme.name, N, bias, weight.kernels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", scheme_names())
def test_operator_is_registered_as_torch_demands(name: str, dtype: torch.dtype) -> None:
    weight, operands = _weight(name, dtype), _weight(name, dtype).operands
    arguments = list(operands.values()), ",".join(operands), name, N, _random(N, seed=5).to(dtype), weight.kernels
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(tensor.dtype == torch.float8_e4m3fn for tensor in operands.values()):
        tests.remove("test_schema")  # compares arguments before and after with allclose, which torch has not for e4m3
    torch.library.opcheck(linear, (_random(5, K, seed=5).to(dtype), *arguments), test_utils=tests)


@pytest.mark.parametrize("name", scheme_names())
def test_operator_is_the_prepared_weights_product(name: str) -> None:
    weight, x, bias = _weight(name, torch.bfloat16), _random(7, K, seed=7).bfloat16(), _random(N, seed=5).bfloat16()
    assert torch.equal(_call(weight, x, bias), weight.matmul(x, bias))
    assert torch.equal(_call(weight, x, None), weight.matmul(x))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", scheme_names())
def test_compiled_function_gives_the_same_numbers(name: str, backend: str) -> None:
    torch._dynamo.reset()
    weight = _weight(name, torch.bfloat16)
    x, bias = _random(9, K, seed=7).bfloat16(), _random(N, seed=5).bfloat16()
    operands, names, kernels = list(weight.operands.values()), ",".join(weight.operands), weight.kernels

    def layer(x: Tensor) -> Tensor:
        return linear(torch.nn.functional.relu(x) - 0.5, operands, names, name, N, bias, kernels) * 2

    assert torch.equal(torch.compile(layer, backend=backend, fullgraph=True)(x), layer(x))
