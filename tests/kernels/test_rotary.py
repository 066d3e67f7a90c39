"""Rotary embedding with and without head norms against Hugging Face's function, its gradients, and paged caches."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from kernel_harness import NEEDS_TRITON, assert_rows_are_their_own
from products import random
from qarl_kernels import pointwise, rotary
from qarl_kernels.flash.pairs import from_cache
from qarl_kernels.rotary import Rotation, rotary_forward, rotary_into_pages
from qarl_kernels.rotary_backward import rotary_backward
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

pytestmark = [NEEDS_TRITON, pytest.mark.usefixtures("poisoned")]

EPS = 1e-6
DTYPES = [torch.bfloat16, torch.float16]
SHAPES = [(5, 4, 2, 64), (9, 5, 1, 80), (3, 3, 3, 96), (2, 2, 1, 256), (7, 3, 1, 8), (0, 4, 2, 64)]
CASES = [(shape, DTYPES[i % 2]) for i, shape in enumerate(SHAPES)]


@dataclass
class Case:
    """Heads of random values, a rotary table of random angles, and norms; `arguments` are the functions' own."""

    qkv: Tensor
    heads: int
    kv_heads: int
    head_dim: int
    cos: Tensor
    sin: Tensor
    positions: Tensor
    norms: tuple[Tensor | None, Tensor | None]

    @classmethod
    def random(
        cls,
        rows: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        norms: bool,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Case:
        qkv = random(rows, (heads + 2 * kv_heads) * head_dim + 16, seed=0, device=device, dtype=dtype)[:, :-16] * 2
        angles = random(50, head_dim, seed=1, device=device) * 3  # of the two halves of a head different ones
        positions = torch.randint(0, 50, (rows,), generator=torch.Generator().manual_seed(2)).to(device)
        weights = [random(head_dim, seed=seed, device=device, dtype=dtype) if norms else None for seed in (3, 4)]
        return cls(
            qkv, heads, kv_heads, head_dim, angles.cos().to(dtype), angles.sin().to(dtype), positions, tuple(weights)
        )

    @property
    def rotation(self) -> Rotation:
        sizes = self.heads, self.kv_heads, self.head_dim
        return Rotation(*sizes, self.cos, self.sin, self.positions, *self.norms, EPS)

    def forward(self) -> tuple[Tensor, Tensor]:
        q, k, v = rotary_forward(self.qkv, self.rotation)
        assert v.data_ptr() == self.rotation.values(self.qkv).data_ptr()
        return q, k

    def heads_of(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys of a fused product, (T, heads, D) each."""
        q, k, _ = qkv.split([n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)], -1)
        return q.unflatten(-1, (self.heads, -1)), k.unflatten(-1, (self.kv_heads, -1))

    def exact(self, qkv: Tensor, norms: list[Tensor] | None) -> tuple[Tensor, Tensor]:
        """The formula in the dtype of qkv."""
        q, k = self.heads_of(qkv)
        if norms is not None:
            q, k = (w * x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() for x, w in zip((q, k), norms, strict=True))
        cos, sin = self.cos[self.positions].to(qkv.dtype), self.sin[self.positions].to(qkv.dtype)
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)

    def backward(self, dq: Tensor, dk: Tensor, into: Tensor, sums: list[Tensor] | None, **options: int) -> None:
        grads = sums if sums is not None else (None, None)
        rotary_backward(dq, dk, self.qkv, self.rotation, into, *grads, **options)


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_rotary_is_hugging_face_bit_for_bit(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    case = Case.random(*shape, device, False, dtype)
    expected = apply_rotary_pos_emb(
        *case.heads_of(case.qkv), case.cos[case.positions], case.sin[case.positions], unsqueeze_dim=1
    )
    for ours, theirs in zip(case.forward(), expected, strict=True):
        assert ours.is_contiguous() and torch.equal(ours, theirs)


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_norm_before_it_is_the_twin(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    case = Case.random(*shape, device, True, dtype)
    normed = [
        pointwise.rms_norm(x.contiguous(), None, w, EPS)
        for x, w in zip(case.heads_of(case.qkv), case.norms, strict=True)
    ]
    twins = apply_rotary_pos_emb(*normed, case.cos[case.positions], case.sin[case.positions], unsqueeze_dim=1)
    exact = case.exact(case.qkv.double(), [w.double() for w in case.norms])
    eps = torch.finfo(dtype).eps
    for ours, twin, expected in zip(case.forward(), twins, exact, strict=True):
        # The twin's sum of squares has another order: now and then a value falls on the other side of a boundary.
        assert (ours != twin).sum() <= 0.01 * twin.numel()
        if not ours.numel():
            continue
        # Four roundings of numbers no larger than those of a head.
        torch.testing.assert_close(ours.double(), expected, rtol=2 * eps, atol=2 * eps * expected.abs().max().item())


@pytest.mark.parametrize(("norms", "kv_fp8"), [(False, True), (True, False)])
def test_a_tokens_bits_are_its_own(norms: bool, kv_fp8: bool, device: torch.device) -> None:
    case = Case.random(11, 3, 1, 80, device, norms)

    def rotated(qkv: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        return rotary_forward(qkv, case.rotation._replace(positions=positions[:, 0].contiguous(), kv_fp8=kv_fp8))

    assert_rows_are_their_own(rotated, case.qkv, case.positions[:, None])


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_gradients_are_those_of_float64(
    shape: tuple[int, ...], dtype: torch.dtype, norms: bool, device: torch.device
) -> None:
    case = Case.random(*shape, device, norms, dtype)
    rows, head_dim = shape[0], case.head_dim
    dq = random(rows, case.heads, head_dim, seed=5, device=device, dtype=dtype)
    dk = random(rows, case.kv_heads, head_dim, seed=6, device=device, dtype=dtype)
    exact = case.qkv.double().requires_grad_()
    weights = [w.double().requires_grad_() for w in case.norms] if norms else None
    torch.autograd.backward(case.exact(exact, weights), (dq.double(), dk.double()))
    before = [random(head_dim, seed=seed, device=device) for seed in (7, 8)]
    sums = [x.clone() for x in before] if norms else None
    into = torch.full_like(case.qkv, 7.0)
    case.backward(dq, dk, into, sums)
    turned = (case.heads + case.kv_heads) * head_dim
    # One rounding to 16 bits; the rest is float32, where terms of size 10 may cancel.
    torch.testing.assert_close(
        into[:, :turned].double(), exact.grad[:, :turned], rtol=0.51 * torch.finfo(dtype).eps, atol=1e-5
    )
    assert (into[:, turned:] == 7.0).all()
    for ours, start, expected in zip(sums or (), before, weights or (), strict=norms):
        torch.testing.assert_close(ours.double(), start + expected.grad, rtol=1e-5, atol=3e-5)


def test_gradients_are_the_same_in_every_run_and_with_few_programs(device: torch.device, monkeypatch) -> None:
    case = Case.random(70, 2, 1, 64, device, True)
    dq, dk = case.heads_of(random(70, 4 * 64, seed=5, device=device, dtype=torch.bfloat16))  # tokens are apart
    results = []
    for programs in (1056, 1056, 2):
        monkeypatch.setattr("qarl_kernels.rotary_backward.PROGRAMS", programs)
        into, sums = torch.zeros_like(case.qkv), [torch.zeros(64, device=device) for _ in range(2)]
        case.backward(dq, dk, into, sums)
        results.append((into, *sums))
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))
    assert torch.equal(results[0][0], results[2][0])  # a head's gradient does not depend on the program that has it
    for a, b in zip(results[0][1:], results[2][1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=3e-5)  # the order of some hundred terms differs


# --- keys and values that are written into a paged cache, against those of the kernel that returns them

PAGED = [(7, 4, 2, 64), (9, 5, 1, 80), (5, 3, 3, 96), (19, 2, 1, 128), (3, 2, 1, 8)]


def _fp8(x: Tensor) -> Tensor:
    """To the nearest e4m3, saturated, as torch's cast of float32 rounds it."""
    return x.float().clamp(-448, 448).to(torch.float8_e4m3fn)


def _cache(pages: int, heads: int, page: int, dim: int, device: torch.device, apart: bool, dtype) -> Tensor:
    """(pages, heads, page, dim) of 7s; apart: a view into memory that has keys and values of a token side by side."""
    if apart:
        return torch.full((pages, page, heads, 2 * dim), 7.0, dtype=dtype, device=device)[..., dim:].transpose(1, 2)
    return torch.full((pages, heads, page, dim), 7.0, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("shape", "page", "apart", "norms"), [(s, (16, 64)[i % 2], i % 3 == 0, i % 4 < 2) for i, s in enumerate(PAGED)]
)
def test_queries_keys_and_values_are_those_of_the_rotation(monkeypatch, device, shape, page, apart, norms) -> None:
    dtype = torch.float16 if shape[0] == 5 else torch.bfloat16
    case = Case.random(*shape, device, norms, dtype)
    qkv, rotation = case.qkv, case.rotation
    rows, _, kv_heads, dim = shape
    slots = 1 + torch.randperm(4 * page - 1, generator=torch.Generator().manual_seed(5))[:rows].to(device)
    slots[:2] = torch.tensor([0, -1], device=device)
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


@pytest.mark.parametrize(("shape", "dtype"), [*zip(PAGED[:2], [torch.bfloat16, torch.float16], strict=True)])
def test_a_cache_of_fp8_holds_what_the_rotation_rounds_to(device, shape, dtype) -> None:
    case = Case.random(*shape, device, True, dtype)
    qkv, rotation = case.qkv, case.rotation
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


def test_heads_of_a_cache_may_be_far_apart(device) -> None:
    """The third is 2^31 values behind the first: in 32 bits that is as many before it, where memory is here too."""
    case = Case.random(3, 3, 3, 96, device, False)
    rounding, slots = case.rotation._replace(kv_fp8=True), torch.arange(3, device=device)
    memory = torch.UntypedStorage(2**32 + 2 * 16 * 96, device=device)  # not poisoned: most of it is not touched
    whole = torch.tensor([], dtype=torch.float8_e4m3fn, device=device).set_(memory)
    far = [whole.as_strided((1, 3, 16, 96), (1, 2**30, 96, 1), 2**31 + at * 16 * 96) for at in range(2)]
    near = [_cache(1, 3, 16, 96, device, False, torch.float8_e4m3fn) for _ in "kv"]
    for cache in far:
        cache.copy_(near[0])
    q = rotary_into_pages(case.qkv, rounding, *far, slots)
    assert torch.equal(q, rotary_into_pages(case.qkv, rounding, *near, slots))
    for wide, close in zip(far, near, strict=True):
        assert torch.equal(wide.contiguous().view(torch.uint8), close.view(torch.uint8))
