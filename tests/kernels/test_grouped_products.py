"""Products of every scheme with experts' weights: rows have the bits of the product with their expert's own weight."""

import mixtures
import pytest
import torch
from products import random
from qarl_formats.registry import make_scheme, scheme_names
from qarl_formats.scheme import Codes, Scheme
from qarl_formats.weight import LowBitWeight, concatenate, quantize_weight
from qarl_kernels.launch import INTERPRETED

pytestmark = pytest.mark.usefixtures("poisoned")

EXPERTS = 3
NAMES = [*scheme_names(), "w4a16 asymmetric", "w4a8 channel"]
RUNNABLE = INTERPRETED or torch.cuda.is_available()
NEEDS = pytest.mark.skipif(not RUNNABLE, reason="needs TRITON_INTERPRET=1 or a GPU")
BY = [pytest.param(True, marks=NEEDS), False]


def _scheme(name: str) -> Scheme:
    plain, _, kind = name.partition(" ")
    group = (-1 if kind == "channel" else 32) if make_scheme(plain).group_sizes else None
    return make_scheme(plain, group, symmetric=kind != "asymmetric")


def _experts(name: str, n: int, k: int, device: torch.device) -> list[LowBitWeight]:
    """Weights (n, k), quantized with what those of a stack share."""
    scheme, masters = _scheme(name), random(EXPERTS, n, k, seed=3, device=device)
    if not scheme.quantized:
        return [LowBitWeight.of_values(values) for values in masters.bfloat16()]
    return [quantize_weight(master, scheme, "w", False, scheme.shared(masters)) for master in masters]


def _width(name: str) -> int:
    return 128 if name == "fp8_block" else 24


@pytest.mark.parametrize(
    ("kernels", "gathered"), [pytest.param(True, True, marks=NEEDS), (False, True), (False, False)]
)
@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_bits_of_its_experts_own_product(device, name: str, kernels: bool, gathered: bool) -> None:
    groups = mixtures.grouped(6, 2, EXPERTS, device)
    weights = _experts(name, _width(name), 160, device)
    x = random(6 if gathered else 12, 160, seed=9, device=device, dtype=torch.bfloat16)
    y = concatenate(weights).prepare(torch.bfloat16, kernels).matmul(x, None, groups, gathered)
    assert y.dtype == torch.bfloat16 and y.shape == (12, _width(name))
    for expert, rows, tokens in mixtures.parts(groups):
        own = x[tokens] if gathered else x[rows]
        assert torch.equal(y[rows], weights[expert].prepare(torch.bfloat16, kernels).matmul(own))


@NEEDS
@pytest.mark.parametrize("name", [name for name in NAMES if _scheme(name).input_codes])
def test_activations_that_are_quantized_already_give_the_same_bits(device, name: str) -> None:
    from qarl_kernels import quantize

    groups, x = mixtures.grouped(5, 2, EXPERTS, device), random(5, 160, seed=9, device=device, dtype=torch.bfloat16)
    weight = concatenate(_experts(name, _width(name), 160, device)).prepare(torch.bfloat16, True)
    codes, scale = quantize.activation_codes(x, weight.scheme.input_codes)
    y = weight.matmul(Codes(codes, scale, torch.bfloat16), None, groups, True)
    assert torch.equal(y, weight.matmul(x, None, groups, True))


@pytest.mark.parametrize("kernels", BY)
def test_no_tokens_give_no_rows_and_what_does_not_fit_is_refused(device, kernels: bool) -> None:
    groups, x = mixtures.grouped(3, 2, EXPERTS, device), torch.zeros(3, 96, dtype=torch.bfloat16, device=device)
    weight = concatenate(_experts("w8a8", 24, 96, device)).prepare(torch.bfloat16, kernels)
    assert weight.matmul(x[:0], None, mixtures.grouped(0, 2, EXPERTS, device), True).shape == (0, 24)
    with pytest.raises(ValueError, match=r"x is \[6, 96\], but the experts take \(3, 96\)"):
        weight.matmul(torch.cat([x, x]), None, groups, True)
    with pytest.raises(ValueError, match="72 rows are not the weights of 7 experts"):
        weight.matmul(x, None, mixtures.grouped(3, 2, 7, device), True)
    for name, n, message in [
        ("fp8_block", 40, "40 output features would share stored values of fp8_block, which span 128"),
        ("w4a16 asymmetric", 20, "20 output features would share stored values of w4a16, which span 8"),
    ]:
        with pytest.raises(ValueError, match=message):
            _one(name, n, device).prepare(torch.bfloat16, kernels).matmul(x, None, groups, True)


def _one(name: str, n: int, device: torch.device) -> LowBitWeight:
    """As many rows as `EXPERTS` weights of n have, quantized as one."""
    return quantize_weight(random(EXPERTS * n, 96, seed=3, device=device), _scheme(name), "w")
