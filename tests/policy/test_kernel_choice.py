"""The choice between kernels and plain torch, and the chosen kernels in Triton's interpreter."""

import pytest
import torch
from policy_models import OneLinear, make_policy, parts_of
from qarl_formats.bits import same_bits
from qarl_formats.registry import make_scheme, scheme_names
from qarl_formats.scheme import Scheme
from qarl_formats.schemes.bf16 import OrdinaryProduct
from qarl_formats.weight import LowBitWeight, quantize_weight
from qarl_kernels.launch import INTERPRETED
from torch import nn

from qarl.config import QuantConfig
from qarl.errors import UserError
from qarl.policy.device import use_kernels
from qarl.weight_sync.quantize import quantize_parameter

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
N, K, GROUP = 24, 64, 32
SCHEMES = list(scheme_names())
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter; TRITON_INTERPRET=1 is not set")


def _quant(scheme: str, **changes) -> QuantConfig:
    return QuantConfig(scheme=scheme, group_size=GROUP if scheme.startswith("w4") else None, **changes)


def _scheme(name: str, **changes) -> Scheme:
    return make_scheme(name, **{"group_size": GROUP if name.startswith("w4") else None, **changes})


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch):
    """capability(8, 0): what torch then says of every GPU."""
    return lambda *of: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: of)


# --- the choice


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_gpu_with_16_bit_activations_runs_kernels(capability, scheme: str) -> None:
    capability(*((8, 9) if scheme.startswith("fp8") else (8, 0)))
    for dtype in (torch.bfloat16, torch.float16):
        assert use_kernels(_quant(scheme), _scheme(scheme), dtype, GPU)


@pytest.mark.parametrize(
    ("kernels", "dtype", "device"),
    [("reference", torch.bfloat16, GPU), ("auto", torch.float32, GPU), ("auto", torch.bfloat16, CPU)],
)
def test_reference_float32_and_the_cpu_run_plain_torch(capability, kernels, dtype, device) -> None:
    capability(8, 0)
    assert not use_kernels(_quant("w4a16", kernels=kernels), _scheme("w4a16"), dtype, device)


SCHEME = r"^quant.scheme: fp8(_block)? .* 8\.9 .* has 8\.6; .*quant\.kernels: reference"


@pytest.mark.parametrize(
    ("quant", "message"),
    [
        (_quant("fp8"), SCHEME),
        (_quant("bf16", kv_cache_dtype="fp8"), r"^quant\.kv_cache_dtype: fp8 .* 8\.9 .* 8\.6; use auto$"),
        (_quant("bf16", backward="fp8"), r"^quant.backward: fp8 .*8\.9 .* 8\.6.*; use bf16$"),
    ],
)
def test_fp8_is_refused_where_it_cannot_run_with_the_way_out(capability, quant, message) -> None:
    capability(8, 6)
    arguments = _scheme(quant.scheme), torch.bfloat16
    with pytest.raises(UserError, match=message) as caught:
        use_kernels(quant, *arguments, GPU)
    assert "\n" not in str(caught.value)
    if quant.backward != "fp8":
        assert not use_kernels(quant.model_copy(update={"kernels": "reference"}), *arguments, GPU)
    capability(8, 9)
    assert use_kernels(quant, *arguments, GPU)


# --- operands


def _published(scheme: str, dtype: torch.dtype = torch.bfloat16, **changes) -> LowBitWeight:
    made = _scheme(scheme, **changes)
    master = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    return quantize_weight(master, made, "w") if made.quantized else LowBitWeight.of_values(master.to(dtype))


@interpreted
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_kernel_operand_holds_the_published_tensors_and_no_float_copy(scheme: str) -> None:
    weight = _published(scheme)
    operand = weight.prepare(torch.bfloat16, kernels=True)
    assert operand.kernels and operand.scheme.name == scheme and operand.tensors is weight.tensors
    published = list(weight.tensors.values())
    own = {name: t for name, t in operand.operands.items() if not any(t is tensor for tensor in published)}
    assert own.keys() == ({"weight_tiled", "weight_meta"} if operand.scheme.packed else set())


@interpreted
@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_held_is_what_was_published_and_shows_a_change_of_any_operand(scheme: str, kernels: bool) -> None:
    names = _published(scheme).prepare(torch.bfloat16, kernels).operands
    for name in names:
        weight = _published(scheme)
        operand = weight.prepare(torch.bfloat16, kernels)
        before, held = {suffix: tensor.clone() for suffix, tensor in weight.tensors.items()}, operand.stored()
        assert list(held) == list(before) and all(same_bits(held[suffix], before[suffix]) for suffix in before)
        operand.operands[name].view(torch.uint8).view(-1)[-1] ^= 1 << 5  # the last byte: of a float its exponent
        try:
            held = operand.stored()
        except ValueError as error:
            assert "does not match its codes and scales" in str(error)
        else:
            assert any(not same_bits(held[suffix], tensor) for suffix, tensor in before.items()), name


@interpreted
@pytest.mark.parametrize("learner", ["aligned", "fake_quant", "full_precision"])
def test_learner_and_sampler_get_their_products(tiny_model, monkeypatch, learner: str) -> None:
    monkeypatch.setattr("qarl.policy.policy.use_kernels", lambda *_: True)
    ignored = "model.layers.0.mlp.down_proj"
    policy = make_policy(
        tiny_model("llama", num_hidden_layers=1),
        "w4a16",
        torch.bfloat16,
        GROUP,
        learner=learner,
        ignore=["lm_head", ignored],
    )
    multiplied: list[str] = []
    for own, sampler in zip(parts_of(policy.weights), parts_of(policy.sampler.weights), strict=True):
        names, features, mine, weight = own.names, own.features, own.weight, sampler.weight
        multiplied += names
        assert names == sampler.names and mine.shape[0] == weight.shape[0] == features.stop - features.start
        assert weight.kernels and weight.scheme.name == ("bf16" if names == (ignored,) else "w4a16")
        if learner == "aligned":
            assert mine is weight
        else:
            plain = learner != "fake_quant" or names != (ignored,)
            assert isinstance(mine.scheme, OrdinaryProduct) == plain
    assert sorted(multiplied) == sorted(policy.linears)


# --- numbers, against the reference


def _linear(scheme: str, kernels: bool, dequantize_input: bool = False, **changes) -> OneLinear:
    torch.manual_seed(0)
    operand = _published(scheme, **changes).prepare(torch.bfloat16, kernels)
    return OneLinear(nn.Linear(K, N), operand, torch.bfloat16, dequantize_input)


@interpreted
@pytest.mark.parametrize(
    ("scheme", "changes"),
    [("w4a16", {"scale_dtype": "float32"})]
    + [(scheme, {"dequantize_input": True}) for scheme in ("w8a8", "fp8", "w4a8", "fp8_block")],
)
def test_kernels_and_reference_agree_in_forward_and_backward(scheme: str, changes) -> None:
    results = []
    for kernels in (False, True):
        linear = _linear(scheme, kernels, **changes)
        x = torch.randn(9, K, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        y = linear(x)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).bfloat16())
        results.append((y.detach(), x.grad, linear.weight.grad, linear.bias.grad))
    (y, *grads), (kernel_y, *kernel_grads) = results
    torch.testing.assert_close(kernel_y, y, rtol=2**-7, atol=1e-4)  # sums in another order: one ulp of bf16
    for kernel_grad, grad in zip(kernel_grads, grads, strict=True):
        assert torch.equal(kernel_grad, grad)  # the same tensors, dequantized to the same bits


# --- publishing


@interpreted
@pytest.mark.parametrize("scheme", SCHEMES[1:])
def test_a_master_that_is_not_finite_is_named_alike(scheme: str) -> None:
    master = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    master[3, 5], master[7, 1] = torch.nan, torch.inf
    messages = []
    for kernels in (False, True):
        with pytest.raises(UserError) as caught:
            quantize_parameter("w.weight", master, _scheme(scheme), torch.bfloat16, 3, kernels)
        messages.append(str(caught.value))
    assert messages[0] == messages[1] and f"w.weight: 2 of {N * K} values are NaN" in messages[0]


@interpreted
def test_heads_that_attention_has_no_kernel_for_are_refused(tiny_model, monkeypatch) -> None:
    monkeypatch.setattr("qarl.policy.policy.use_kernels", lambda *_: True)
    with pytest.raises(
        UserError, match=r"^model\.path: the model has heads of 20 features, but the GPU attention kernels"
    ):
        make_policy(tiny_model("qwen3", head_dim=20), "bf16")
