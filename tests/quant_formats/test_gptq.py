"""GPTQ on single weights: against a naive oracle, and the masters of its codes."""

import pytest
import torch
from qarl_formats.bits import same_bits
from qarl_formats.gptq import gptq
from qarl_formats.registry import make_scheme
from torch import Tensor

N, K, T = 24, 192, 400
SCHEMES = [
    *(make_scheme("w4a16", size, symmetric) for size in (32, 64, -1) for symmetric in (True, False)),
    make_scheme("w4a16", 64, grid="symmetric7"),
    make_scheme("w4a16", 64, False, scale_dtype="float32"),
    make_scheme("w4a16", 64, scale_dtype="float32"),
    make_scheme("w4a8", 64),
    make_scheme("w8a8"),
    make_scheme("nvfp4a16"),
]


def _id(scheme):
    return f"{scheme.name}-{scheme.group_size}-{'sym' if scheme.symmetric else 'asym'}-{scheme.grid}"


def _inputs(seed: int = 0, rows: int = T, columns: int = K) -> Tensor:
    """Correlated inputs, some of which are large, as the residual stream of a model has them."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5 + torch.eye(columns)
    sizes = torch.logspace(-1, 1, columns)[torch.randperm(columns, generator=generator)]
    return torch.randn(rows, columns, generator=generator) @ mix * sizes


def _weight(seed: int = 1) -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) * 0.05


def _hessian(x: Tensor) -> Tensor:
    return x.double().t() @ x.double()


def _loss(weight: Tensor, stored, scheme, hessian: Tensor) -> float:
    difference = (weight - scheme.dequantize(stored, (N, K), torch.float32)).double()
    return float(((difference @ hessian) * difference).sum())


def _naive(weight: Tensor, hessian: Tensor, scheme, keep) -> Tensor:
    """Codes by the formulas of optimal brain quantization, with explicit updates of the inverse. keep: (row, column)
    pairs that keep their nearest codes."""
    stored, _ = scheme.quantize(weight)
    nearest = scheme.codes(stored, (N, K)).double()
    levels, step, zero = (one.double() for one in scheme.code_grid(stored, (N, K)))
    width = K // step.shape[1]
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(K, dtype=torch.float64)
    inverse, left = torch.linalg.inv(damped), weight.double().clone()
    codes = nearest.clone()
    for q in hessian.diagonal().argsort(descending=True, stable=True).tolist():
        s, z = step[:, q // width], zero[:, q // width]
        for row in range(N):
            if (row, q) not in keep:
                distance = (levels - (left[row, q] / s[row] + z[row])).abs()
                codes[row, q] = levels[distance.argmin()]
        error = (left[:, q] - (codes[:, q] - z) * s) / inverse[q, q]
        left -= error[:, None] * inverse[q][None]
        inverse = inverse - torch.outer(inverse[:, q], inverse[q]) / inverse[q, q]
        inverse[q, q] = 1.0  # not read again
    return codes.float()


def _ends(weight: Tensor, scheme) -> set[tuple[int, int]]:
    """The elements that make the scales, found one group at a time."""
    stored, _ = scheme.quantize(weight)
    groups = scheme.code_grid(stored, (N, K)).step.shape[1]
    width, keep = K // groups, set()
    for row in range(N):
        for start in range(0, K, width):
            part = weight[row, start : start + width]
            extremes = [part.abs().argmax()] if scheme.symmetric else [part.argmin(), part.argmax()]
            keep |= {(row, start + int(one)) for one in extremes}
    return keep


@pytest.mark.parametrize("scheme", SCHEMES, ids=_id)
def test_codes_are_those_of_a_naive_implementation_and_scales_those_of_rounding_to_nearest(scheme):
    weight, hessian = _weight(), _hessian(_inputs())
    (stored, _), (rtn, _) = gptq(weight, hessian, scheme), scheme.quantize(weight)
    assert torch.equal(scheme.codes(stored, (N, K)).float(), _naive(weight, hessian, scheme, _ends(weight, scheme)))
    assert list(stored) == list(rtn)
    assert all(same_bits(stored[name], rtn[name]) for name in rtn.keys() - {"weight", "weight_packed"})
    assert _loss(weight, stored, scheme, hessian) < 0.75 * _loss(weight, rtn, scheme, hessian)


def _odd_weights() -> dict[str, Tensor]:
    normal = _weight()
    return {
        "normal": normal,
        "zeros": normal.index_fill(0, torch.tensor([3]), 0.0).index_fill(1, torch.arange(64, 96), 0.0),
        "one sign": normal.abs() + 0.01,
        "every size": normal * torch.logspace(-7, 2, K),
        "outlier": normal.index_fill(1, torch.tensor([5]), 3.0),
        "two values": normal.sign() * 0.37,
        "tiny": normal * 1e-38,
    }


# Each scheme with a third of the weights, each weight with a third of the schemes
MET = [(scheme, case) for i, scheme in enumerate(SCHEMES) for j, case in enumerate(_odd_weights()) if (i + j) % 3 == 0]


@pytest.mark.parametrize(("scheme", "case"), MET, ids=lambda it: it if isinstance(it, str) else _id(it))
def test_a_master_quantizes_to_the_codes_and_scales(scheme, case):
    weight = _odd_weights()[case]
    stored, master = gptq(weight, _hessian(_inputs()).float(), scheme)
    again, _ = scheme.quantize(master)
    assert all(same_bits(again[name], stored[name]) for name in stored)


def test_inputs_that_are_never_seen_or_uncorrelated_keep_their_nearest_codes():
    scheme, weight, x = make_scheme("w4a16", 64), _weight(), _inputs()
    x[:, 40:80] = 0.0
    rtn, _ = scheme.quantize(weight)
    stored, _ = gptq(weight, _hessian(x), scheme)
    ours, nearest = (scheme.codes(one, (N, K)) for one in (stored, rtn))
    assert torch.equal(ours[:, 40:80], nearest[:, 40:80])
    assert not torch.equal(ours, nearest)
    for uncorrelated in (torch.zeros(K, K), torch.eye(K)):
        assert torch.equal(gptq(weight, uncorrelated, scheme)[0]["weight_packed"], rtn["weight_packed"])


def test_a_hessian_that_is_not_finite_is_an_error():
    with pytest.raises(ValueError, match="no Cholesky factor"):
        gptq(_weight(), torch.full((K, K), float("nan")), make_scheme("w4a16", 64))
