"""Rotary embedding with and without head norms against Hugging Face's function in 16 bits, and its gradients."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from products import random
from qarl_kernels import pointwise
from qarl_kernels.rotary import Rotation, rotary_forward
from qarl_kernels.rotary_backward import rotary_backward
from running import NEEDS_TRITON
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

pytestmark = [NEEDS_TRITON, pytest.mark.usefixtures("poisoned")]

EPS = 1e-6
DTYPES = [torch.bfloat16, torch.float16]
SHAPES = [(5, 4, 2, 64), (9, 5, 1, 80), (3, 3, 3, 96), (17, 2, 1, 128), (2, 2, 1, 256), (7, 3, 1, 8), (0, 4, 2, 64)]
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
        qkv = random(rows, (heads + 2 * kv_heads) * head_dim, seed=0, device=device, dtype=dtype) * 2
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


@pytest.mark.parametrize("norms", [False, True])
def test_a_token_has_the_same_bits_in_every_batch(norms: bool, device: torch.device) -> None:
    case = Case.random(21, 3, 1, 80, device, norms)
    whole = case.forward()
    order = torch.randperm(21, generator=torch.Generator().manual_seed(0)).to(device)
    for rows in (slice(20, 21), slice(5, 14), order):
        part = Case(case.qkv[rows].clone(), 3, 1, 80, case.cos, case.sin, case.positions[rows].clone(), case.norms)
        for ours, expected in zip(part.forward(), whole, strict=True):
            assert torch.equal(ours, expected[rows])


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


def test_rows_may_be_apart_and_only_queries_have_a_norm(device: torch.device) -> None:
    case = Case.random(9, 2, 1, 64, device, True)
    case.norms = case.norms[0], None
    wide = torch.cat([case.qkv, case.qkv], 1)[:, : 4 * 64]
    apart = Case(wide, 2, 1, 64, case.cos, case.sin, case.positions, case.norms)
    for ours, expected in zip(apart.forward(), case.forward(), strict=True):
        assert torch.equal(ours, expected)
    dq, dk = case.forward()
    results = [torch.zeros_like(case.qkv), torch.zeros(9, 300, dtype=case.qkv.dtype, device=device)[:, : 4 * 64]]
    sums = [torch.zeros(64, device=device) for _ in results]
    for which, into, total in zip((case, apart), results, sums, strict=True):
        which.backward(dq, dk, into, [total, None])
    assert torch.equal(*results) and torch.equal(*sums) and sums[0].any()


def test_wrong_tensors_are_errors(device: torch.device) -> None:
    case = Case.random(3, 4, 2, 64, device, False)
    q, k = case.forward()
    with pytest.raises(ValueError, match=r"^qkv must be a 16-bit matrix of 448 columns"):
        rotary_forward(case.qkv, case.rotation._replace(heads=3))
    with pytest.raises(ValueError, match=r"^dk must have contiguous heads"):
        case.backward(q, k.transpose(0, 1).contiguous().transpose(0, 1), torch.empty_like(case.qkv), None)
