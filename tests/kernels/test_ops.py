"""The operators `torch.ops.qarl.*`: registration, numbers, gradients, torch.compile and checkpointing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from qarl_formats.packing import unpack_int4, unpack_zero_points
from qarl_formats.quantize import dequantize_weight, quantize_weight
from qarl_formats.scheme import make_scheme
from qarl_kernels import ops, reference, unpack
from qarl_kernels.activation import quantize_activation_fp8, quantize_activation_int8
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

N, K, GROUP = 40, 96, 32
NAMES = ["dense", "w4a16", "w4a16 asymmetric", "w8a8", "fp8", "fp8_block", "w4a8"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Case:
    """An operator, its stored weight (arguments after x, by name), and what it stands for."""

    op: object
    stored: dict[str, Tensor | None]
    dequantized: Tensor  # (N, K) of the compute dtype
    expected: object  # x -> y in float64 without roundings but those of codes


def _case(name: str, dtype: torch.dtype, device: torch.device, n: int = N, k: int = K) -> Case:
    master = _random(n, k, seed=2)
    scheme, _, kind = name.partition(" ")
    op = getattr(ops, scheme)
    if scheme == "dense":
        stored, values = {"weight": master.to(dtype)}, master.to(dtype)
    elif scheme == "fp8_block":
        scale = _random(-(-n // 128), -(-k // 128), seed=4).abs().add(0.1).mul(0.01).bfloat16()
        codes = (master * 60).to(torch.float8_e4m3fn)
        stored, values = {"codes": codes, "scale": scale}, unpack.dequantized_fp8_block(codes, scale, dtype)
    else:
        made = make_scheme(scheme, GROUP if scheme[:2] == "w4" else None, symmetric=kind != "asymmetric")
        weight = quantize_weight(master, made, "w")
        tensors, values = weight.tensors, dequantize_weight(weight, dtype)
        stored = {"scale": tensors["weight_scale"]}
        stored |= {"packed": tensors["weight_packed"]} if made.packed else {"codes": tensors["weight"]}
        if kind == "asymmetric":
            stored["zero_point"] = tensors["weight_zero_point"]

    def expected(x: Tensor) -> Tensor:
        exact = values if scheme in ("dense", "w4a16") else _exact(scheme, stored)
        return _rounded_activation(scheme, x.cpu()) @ exact.double().cpu().t()

    on_device = {key: tensor.to(device) for key, tensor in stored.items()}
    return Case(op, on_device, values.to(device), expected)


def _exact(scheme: str, stored: dict[str, Tensor]) -> Tensor:
    """code * scale in float64: low-bit products never round the weight itself."""
    codes = unpack_int4(stored["packed"], K) if "packed" in stored else stored["codes"]
    scale = stored["scale"].double()
    if scheme == "fp8_block":
        return codes.double() * scale.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]
    return codes.double() * scale.repeat_interleave(K // scale.shape[1], 1)


def _rounded_activation(scheme: str, x: Tensor) -> Tensor:
    """What an operator makes of x, in float64."""
    if scheme in ("dense", "w4a16"):
        return x.double()
    if scheme == "fp8_block":  # K <= 128 here: one group a row
        assert x.shape[1] <= 128
    codes, scale = (quantize_activation_fp8 if scheme.startswith("fp8") else quantize_activation_int8)(x)
    return codes.double() * scale.double()


def _x(m: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _random(m, K, seed=m).to(device, dtype)


def _trained(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    """Keyword arguments of a layer in training: the stored weight, a bias and both masters."""
    masters = {"master": _random(N, K, seed=2).to(device), "bias_master": _random(N, seed=5).to(device)}
    bias = masters["bias_master"].to(dtype, copy=True)
    return case.stored | {"bias": bias} | {key: tensor.requires_grad_() for key, tensor in masters.items()}


def _backward(call, x: Tensor, arguments: dict[str, Tensor | None]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(y, dy, dx, dW, db)."""
    x = x.clone().requires_grad_()
    y = call(x, **arguments)
    dy = _random(*y.shape, seed=6).to(y)
    grads = torch.autograd.grad(y, (x, arguments["master"], arguments["bias_master"]), dy)
    return y.detach(), dy, *grads


def _opcheck(op, arguments: tuple, keywords: dict[str, Tensor | None]) -> None:
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    values = [*arguments, *keywords.values()]
    if any(isinstance(value, Tensor) and value.dtype == torch.float8_e4m3fn for value in values):
        tests.remove("test_schema")  # compares arguments before and after with allclose, which torch has not for e4m3
    torch.library.opcheck(op, arguments, keywords, test_utils=tests)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_operator_is_registered_as_torch_demands(device, name: str, dtype: torch.dtype) -> None:
    case = _case(name, dtype, device)
    _opcheck(case.op, (_x(5, dtype, device),), case.stored)
    _opcheck(case.op, (_x(5, dtype, device).requires_grad_(),), _trained(case, dtype, device))


@pytest.mark.parametrize("name", ["dequantize_int4", "dequantize_channel", "dequantize_fp8_block"])
def test_dequantization_is_registered_as_torch_demands(device, name: str) -> None:
    stored = _case({"int4": "w4a16 asymmetric", "channel": "w8a8"}.get(name[11:], "fp8_block"), torch.float32, device)
    tensors = list(stored.stored.values())
    arguments = (tensors[1], tensors[0], tensors[2], K) if name == "dequantize_int4" else tuple(reversed(tensors))
    if name == "dequantize_fp8_block":
        arguments = tuple(tensors)
    _opcheck(getattr(ops, name), (*arguments, torch.bfloat16), {})


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("m", [0, 1, 5, 33])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_operator_is_its_formula(device, name: str, dtype: torch.dtype, m: int, with_bias: bool) -> None:
    case, x = _case(name, dtype, device), _x(m, dtype, device)
    bias = _random(N, seed=5).to(device, dtype) if with_bias else None
    y = case.op(x, **case.stored, bias=bias)
    expected = case.expected(x) + (0 if bias is None else bias.double().cpu())
    assert y.dtype == dtype and y.shape == (m, N)
    # one rounding to dtype of a float32 result, whose own error is K * 2^-24 of terms under 100
    torch.testing.assert_close(y.double().cpu(), expected, rtol=torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_operator_on_the_cpu_is_the_reference(name: str, dtype: torch.dtype) -> None:
    cpu = torch.device("cpu")
    case, x, bias = _case(name, dtype, cpu), _x(7, dtype, cpu), _random(N, seed=5).to(dtype)
    scheme = name.split()[0]
    if scheme in ("dense", "w4a16"):
        expected = reference.dense(x, case.dequantized.float(), bias)
    else:
        stored = case.stored
        codes = unpack_int4(stored["packed"], K) if "packed" in stored else stored["codes"]
        expected = getattr(reference, scheme)(x, codes.float(), stored["scale"], bias)
    assert torch.equal(case.op(x, **case.stored, bias=bias), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_straight_through(device, name: str, dtype: torch.dtype) -> None:
    case, x = _case(name, dtype, device), _x(9, dtype, device)
    _, dy, dx, grad_weight, grad_bias = _backward(case.op, x, _trained(case, dtype, device))
    wide = dy.double()
    # dx is rounded to dtype once; dW and db are float32 sums over 9 rows
    torch.testing.assert_close(dx.double(), wide @ case.dequantized.double(), rtol=torch.finfo(dtype).eps, atol=1e-4)
    torch.testing.assert_close(grad_weight.double(), wide.t() @ x.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad_bias.double(), wide.sum(0), rtol=1e-5, atol=1e-5)
    assert dx.dtype == dtype and grad_weight.dtype == grad_bias.dtype == torch.float32


def test_a_bias_that_is_its_own_master_gets_its_gradient_once(device) -> None:
    case, x = _case("dense", torch.float32, device), _x(9, torch.float32, device)
    bias = _random(N, seed=5).to(device).requires_grad_()
    case.op(x, **case.stored, bias=bias, bias_master=bias).sum().backward()
    assert torch.equal(bias.grad, torch.full_like(bias, 9.0))


@pytest.mark.parametrize("wanted", ["x", "master", "bias_master", "bias"])
def test_one_gradient_alone_can_be_had(device, wanted: str) -> None:
    case = _case("w4a16", torch.bfloat16, device)
    arguments = {"x": _x(9, torch.bfloat16, device)} | _trained(case, torch.bfloat16, device)
    arguments = {key: tensor.detach().requires_grad_(key == wanted) for key, tensor in arguments.items()}
    case.op(**arguments).sum().backward()
    grad = arguments[wanted].grad
    assert grad.dtype == arguments[wanted].dtype and grad.abs().sum() > 0


class _Layer(nn.Module):
    def __init__(self, case: Case, arguments: dict[str, Tensor | None]) -> None:
        super().__init__()
        self.op, self.arguments = case.op, arguments

    def forward(self, x: Tensor, **arguments: Tensor | None) -> Tensor:
        return self.op(nn.functional.relu(x) - 0.5, **arguments) * 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", NAMES)
def test_compiled_module_gives_the_same_numbers(device, name: str, backend: str) -> None:
    torch._dynamo.reset()
    case, x = _case(name, torch.bfloat16, device), _x(9, torch.bfloat16, device)
    arguments = _trained(case, torch.bfloat16, device)
    layer = _Layer(case, arguments)
    expected = _backward(layer, x, arguments)
    found = _backward(torch.compile(layer, backend=backend, fullgraph=True), x, arguments)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_checkpointing_gives_the_same_gradients(device, name: str) -> None:
    case, x = _case(name, torch.bfloat16, device), _x(9, torch.bfloat16, device)
    arguments = _trained(case, torch.bfloat16, device)
    expected = _backward(case.op, x, arguments)
    again = _backward(lambda x, **rest: checkpoint(case.op, x, use_reentrant=False, **rest), x, arguments)
    for one, other in zip(again, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_rows_keep_their_bits_in_every_batch_and_layout(device, name: str) -> None:
    case, x = _case(name, torch.bfloat16, device), _x(70, torch.bfloat16, device)
    whole = case.op(x, **case.stored)
    for start, rows in [(0, 1), (37, 2), (5, 33), (20, 50)]:
        assert torch.equal(case.op(x[start : start + rows], **case.stored), whole[start : start + rows])
    columns = x.t().contiguous().t()
    wide = torch.cat([x, x], 1)[:, :K]
    assert torch.equal(case.op(columns, **case.stored), whole) and torch.equal(case.op(wide, **case.stored), whole)


@pytest.mark.parametrize("name", NAMES)
def test_x_that_does_not_fit_is_refused(device, name: str) -> None:
    case = _case(name, torch.bfloat16, device)
    for shape in [(3, K + 8), (2, 3, K), (K,)]:
        with pytest.raises(ValueError, match=r"x is \[.*(reshape x|give x as)"):
            case.op(torch.zeros(shape, dtype=torch.bfloat16, device=device), **case.stored)


@pytest.mark.parametrize(("n", "k", "groups"), [(1, 8, 1), (13, 96, 3), (40, 20, 1), (9, 7, 1)])
def test_unpacking_is_that_of_the_format(n: int, k: int, groups: int) -> None:
    generator = torch.Generator().manual_seed(n)
    packed = torch.randint(-(2**31), 2**31, (n, -(-k // 8)), generator=generator).to(torch.int32)
    zeros = torch.randint(-(2**31), 2**31, (-(-n // 8), groups), generator=generator).to(torch.int32)
    assert torch.equal(unpack.int4_codes(packed, k), unpack_int4(packed, k))
    assert torch.equal(unpack.int4_zero_points(zeros, n), unpack_zero_points(zeros, n))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["w4a16", "w4a16 asymmetric", "w8a8", "fp8", "w4a8"])
def test_dequantization_is_that_of_the_format(device, name: str, dtype: torch.dtype) -> None:
    case = _case(name, dtype, device)
    stored = case.stored
    if "packed" in stored:
        found = ops.dequantize_int4(stored["packed"], stored["scale"], stored.get("zero_point"), K, dtype)
    else:
        found = ops.dequantize_channel(stored["codes"], stored["scale"], dtype)
    assert torch.equal(found, case.dequantized)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only CUDA reads the tiled form; torch sees no CUDA device")
@pytest.mark.parametrize("name", ["w4a16", "w4a16 asymmetric", "w4a8"])
def test_the_tiled_form_gives_the_same_bits(device, name: str) -> None:
    from qarl_kernels import tile

    case, x = _case(name, torch.bfloat16, device), _x(33, torch.bfloat16, device)
    packed, scale, zero_point = (case.stored.get(key) for key in ("packed", "scale", "zero_point"))
    meta = (
        tile.meta_w4a8(scale, N, K, GROUP)
        if name == "w4a8"
        else tile.meta_w4a16(scale, zero_point, N, K, GROUP, torch.bfloat16)
    )
    tiled = case.op(x, **case.stored, tiled=tile.tile_int4(packed, K), meta=meta)
    assert torch.equal(tiled, case.op(x, **case.stored))
