"""Keys and values that the rotary kernel writes into a paged cache, against those of the kernel that returns them."""

import pytest
import torch
from products import random
from qarl_kernels import rotary
from qarl_kernels.flash.pairs import from_cache
from qarl_kernels.rotary import Rotation, rotary_forward, rotary_into_pages
from running import NEEDS_TRITON
from torch import Tensor

pytestmark = [NEEDS_TRITON, pytest.mark.usefixtures("poisoned")]

# (rows, heads, kv_heads, head size)
SHAPES = [(7, 4, 2, 64), (9, 5, 1, 80), (5, 3, 3, 96), (19, 2, 1, 128), (3, 2, 1, 8), (0, 3, 1, 64)]


def _case(shape: tuple[int, ...], device: torch.device, norms: bool, dtype=torch.bfloat16) -> tuple[Tensor, Rotation]:
    rows, heads, kv_heads, dim = shape
    qkv = random(rows, (heads + 2 * kv_heads) * dim + 16, seed=0, device=device, dtype=dtype)[:, :-16]
    angles = random(50, dim, seed=1, device=device) * 3
    positions = torch.randint(0, 50, (rows,), generator=torch.Generator().manual_seed(2)).to(device)
    weights = [random(dim, seed=seed, device=device, dtype=dtype) if norms else None for seed in (3, 4)]
    return qkv, Rotation(
        heads, kv_heads, dim, angles.cos().to(dtype), angles.sin().to(dtype), positions, *weights, 1e-6
    )


def _fp8(x: Tensor) -> Tensor:
    """To the nearest e4m3, saturated, as torch's cast of float32 rounds it."""
    return x.float().clamp(-448, 448).to(torch.float8_e4m3fn)


def _cache(pages: int, heads: int, page: int, dim: int, device: torch.device, apart: bool, dtype) -> Tensor:
    """(pages, heads, page, dim) of 7s; apart: a view into memory that has keys and values of a token side by side."""
    if apart:
        return torch.full((pages, page, heads, 2 * dim), 7.0, dtype=dtype, device=device)[..., dim:].transpose(1, 2)
    return torch.full((pages, heads, page, dim), 7.0, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("shape", "page", "apart", "norms"),
    [(s, (16, 64)[i % 2], i % 3 == 0, i % 4 < 2) for i, s in enumerate(SHAPES)],
)
def test_queries_keys_and_values_are_those_of_the_rotation(monkeypatch, device, shape, page, apart, norms) -> None:
    dtype = torch.float16 if shape[0] == 5 else torch.bfloat16
    qkv, rotation = _case(shape, device, norms, dtype)
    rows, _, kv_heads, dim = shape
    slots = torch.randperm(4 * page, generator=torch.Generator().manual_seed(5))[:rows].to(device)
    slots[1:2] = -1
    caches = [_cache(4, kv_heads, page, dim, device, apart, dtype) for _ in "kv"]
    expected = [cache.clone() for cache in caches]
    q, k, v = rotary_forward(qkv, rotation)
    written = slots >= 0
    for cache, values in zip(expected, (k, v), strict=True):
        cache[slots[written] // page, :, slots[written] % page] = values[written]
    for few_rows in (512, 0):  # programs of one head, and of several
        monkeypatch.setattr(rotary, "FEW_ROWS", few_rows)
        for cache in caches:
            cache.fill_(7.0)
        assert torch.equal(rotary_into_pages(qkv, rotation, *caches, slots), q)
        for cache, wanted in zip(caches, expected, strict=True):
            assert torch.equal(cache, wanted)


@pytest.mark.parametrize(("shape", "dtype"), [*zip(SHAPES[:4], [torch.bfloat16, torch.float16] * 2, strict=True)])
def test_a_cache_of_fp8_holds_what_the_rotation_rounds_to(device, shape, dtype) -> None:
    qkv, rotation = _case(shape, device, True, dtype)
    rows, _, kv_heads, dim = shape
    edges = [3e-3, -1.0, 1e-3, -7e-4, 500.0, 1000.0, -2000.0, 448.0]
    qkv[0] = torch.tensor(edges, dtype=dtype).repeat(qkv.shape[1] // 8)
    q, k, v = rotary_forward(qkv, rotation)
    rounding = rotation._replace(kv_fp8=True)
    same_q, rounded_k, rounded_v = rotary_forward(qkv, rounding)
    assert torch.equal(same_q, q)
    for rounded, exact in ((rounded_k, k), (rounded_v, v)):
        assert rounded.is_contiguous() and torch.equal(rounded, _fp8(exact).to(dtype))
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(5))[:rows].to(device)
    slots[-1] = -1
    for held in (torch.float8_e4m3fn, dtype):
        caches = [_cache(4, kv_heads, 16, dim, device, True, held) for _ in "kv"]
        expected = [cache.to(dtype) for cache in caches]  # 7s, in any order
        written = slots >= 0
        for cache, values in zip(expected, (rounded_k, rounded_v), strict=True):
            cache[slots[written] // 16, :, slots[written] % 16] = values[written]
        assert torch.equal(rotary_into_pages(qkv, rounding, *caches, slots), q)
        found = [from_cache(cache).to(dtype) if held.itemsize == 1 else cache for cache in caches]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_is_not_finite_stays_so_in_fp8(device) -> None:
    qkv, rotation = _case((3, 2, 1, 64), device, False)
    qkv[1, -64:] = torch.nan
    *_, v = rotary_forward(qkv, rotation._replace(kv_fp8=True))
    assert v[1].isnan().all() and v[[0, 2]].isfinite().all()


def test_a_tokens_bits_are_its_own(device) -> None:
    qkv, rotation = _case((21, 3, 1, 80), device, True)
    slots = torch.arange(21, device=device)
    whole, alone = ([_cache(2, 1, 16, 80, device, False, qkv.dtype) for _ in "kv"] for _ in "ab")
    q = rotary_into_pages(qkv, rotation, *whole, slots)
    for part in (slice(0, 1), slice(1, 14), slice(14, 21)):
        own = rotation._replace(positions=rotation.positions[part].clone())
        assert torch.equal(rotary_into_pages(qkv[part].clone(), own, *alone, slots[part].clone()), q[part])
    assert all(torch.equal(a, b) for a, b in zip(alone, whole, strict=True))


def test_heads_of_a_cache_may_be_far_apart(device) -> None:
    """The third is 2^31 values behind the first: in 32 bits that is as many before it, where memory is here too."""
    qkv, rotation = _case((3, 3, 3, 96), device, False)
    rounding, slots = rotation._replace(kv_fp8=True), torch.arange(3, device=device)
    memory = torch.UntypedStorage(2**32 + 2 * 16 * 96, device=device)  # not poisoned: most of it is not touched
    whole = torch.tensor([], dtype=torch.float8_e4m3fn, device=device).set_(memory)
    far = [whole.as_strided((1, 3, 16, 96), (1, 2**30, 96, 1), 2**31 + at * 16 * 96) for at in range(2)]
    near = [_cache(1, 3, 16, 96, device, False, torch.float8_e4m3fn) for _ in "kv"]
    for cache in far:
        cache.copy_(near[0])
    assert torch.equal(rotary_into_pages(qkv, rounding, *far, slots), rotary_into_pages(qkv, rounding, *near, slots))
    for wide, close in zip(far, near, strict=True):
        assert torch.equal(wide.contiguous().view(torch.uint8), close.view(torch.uint8))


def test_a_cache_that_does_not_fit_is_an_error(device) -> None:
    qkv, rotation = _case((3, 3, 1, 64), device, False)
    slots = torch.arange(3, device=device)
    fitting = _cache(2, 1, 16, 64, device, False, qkv.dtype)
    for cache, why in (
        (fitting.half(), "does not take 1 heads of 64"),
        (fitting.to(torch.float8_e4m3fn), "does not take 1 heads of 64"),
        (_cache(2, 2, 16, 64, device, False, qkv.dtype), "does not take 1 heads of 64"),
        (_cache(2, 1, 64, 16, device, False, qkv.dtype).transpose(2, 3), "last dimension must be contiguous"),
    ):
        with pytest.raises(ValueError, match=why):
            rotary_into_pages(qkv, rotation, fitting, cache, slots)
