"""Token log-probs, their gradients and truncation against float64: plain torch in chunks, kernels without logits."""

import math

import pytest
import torch
from kernel_harness import BY, NEEDS_TRITON, QUIET, assert_rows_are_their_own
from pairwise import pairwise
from products import random, relative_error
from qarl_kernels import gemm, head
from qarl_kernels.head import FusedTokenLogProbs, Logits
from qarl_kernels.logprob import CUT_LOGIT_GAP, Truncation, log_probs_of, logits_of, token_logprobs, truncate_
from torch import Tensor

pytestmark = [pytest.mark.usefixtures("poisoned", "small_head"), QUIET]

# (rows, vocabulary, features): one tile and a bit, whole tiles, features that only pointers can read
SHAPES = [(37, 300, 48), (64, 128, 32), (5, 259, 20)]
UNRANKED = [Truncation(), Truncation(temperature=0.0), Truncation(temperature=1.3, min_p=0.02)]
RANKED = [Truncation(top_k=5), Truncation(top_p=0.8), Truncation(temperature=1.3, top_k=20, top_p=0.9, min_p=0.01)]
PLAIN = [torch.float32, torch.bfloat16]
NARROW = [torch.bfloat16, torch.float16]


def _case(
    kernels: bool, device: torch.device, dtype=torch.bfloat16, rows=37, vocabulary=300, features=48
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the output layer (float32 for plain torch), and targets."""
    hidden = random(rows, features, seed=1, device=device, dtype=dtype)
    weight = random(vocabulary, features, seed=2, device=device) * (2.5 / math.sqrt(features))
    weight = weight.to(dtype) if kernels else weight
    targets = torch.randint(0, vocabulary, (rows,), generator=torch.Generator().manual_seed(3)).to(device)
    if rows > 2:  # the first and the last token, and the likeliest, which nothing cuts
        targets[0], targets[1] = 0, vocabulary - 1
        targets[2] = (hidden[2].double() @ weight.double().t()).argmax()
    return hidden, weight, targets


def _computed(kernels: bool, hidden, master, weight, targets, truncation, retained=None, sum_of=None):
    if not kernels:
        return token_logprobs(hidden, master, weight, targets, truncation, 7, False, retained, sum_of)
    mass = None
    if retained is not None and truncation.active:
        retained.append(mass := torch.empty(len(hidden), device=hidden.device))
    return FusedTokenLogProbs.apply(hidden, master, weight, targets, truncation, mass, sum_of)


def _kept(logits: Tensor, t: Truncation) -> Tensor:
    """Which tokens the sampler may draw, row by row in plain Python. logits: (V,) float64, after temperature."""
    p = logits.softmax(-1).tolist()
    order = sorted(range(len(p)), key=lambda i: -p[i])
    kept = set(order[: t.top_k] if t.top_k else order)
    kept &= {i for i in kept if p[i] >= t.min_p * max(p)}
    total = sum(p[i] for i in kept)
    before, nucleus = 0.0, set()
    for i in (i for i in order if i in kept):
        if before < t.top_p:
            nucleus.add(i)
        before += p[i] / total
    return torch.tensor([i in nucleus for i in range(len(p))])


def _exact(hidden: Tensor, weight: Tensor, targets: Tensor, t: Truncation) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In float64: log-prob (a constant where the target is cut), entropy, whether the target is kept, the kept mass."""
    logits = hidden.double() @ weight.double().t() / t.divisor
    kept = torch.stack([_kept(row, t) for row in logits.detach().cpu()]).to(logits.device)
    top = logits.detach().amax(-1, keepdim=True)
    logp = torch.where(kept, logits, top - CUT_LOGIT_GAP).log_softmax(-1)
    drawn, mass = kept.gather(-1, targets[:, None])[:, 0], (logits.detach().softmax(-1) * kept).sum(-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1), drawn, mass


VALUES = [
    *(pytest.param(True, *case, marks=NEEDS_TRITON) for case in pairwise(SHAPES, UNRANKED, NARROW)),
    *((False, *case) for case in pairwise(SHAPES, UNRANKED + RANKED, PLAIN)),
]


@pytest.mark.parametrize(("kernels", "shape", "truncation", "dtype"), VALUES, ids=str)
def test_log_probs_entropies_and_masses_are_those_of_float64(device, kernels, shape, truncation, dtype) -> None:
    hidden, weight, targets = _case(kernels, device, dtype, *shape)
    retained: list[Tensor] = []
    found, found_entropy = _computed(kernels, hidden, None, weight, targets, truncation, retained)
    logp, entropy, drawn, kept = _exact(hidden, weight, targets, truncation)
    assert found.dtype == found_entropy.dtype == torch.float32
    # float32 sums of K products of magnitude up to 10 and of V exponentials, exp and log of a few ulps
    torch.testing.assert_close(found[drawn].double(), logp[drawn], rtol=1e-5, atol=1e-5)
    assert torch.isneginf(found[~drawn]).all()
    torch.testing.assert_close(found_entropy.double(), entropy, rtol=1e-5, atol=1e-5)
    if not truncation.active:
        assert retained == [] and drawn.all()
        return
    torch.testing.assert_close(retained[0].double(), kept, rtol=1e-5, atol=0)
    assert retained[0].max() <= 1.0 and (len(hidden) < 30 or not drawn.all()), "the case has cut targets"
    plain = _computed(kernels, hidden, None, weight, targets, truncation)
    assert torch.equal(plain[0], found) and torch.equal(plain[1], found_entropy)


USED = {"logp": (0,), "both": (0, 1)}
GRADIENTS = [
    *(pytest.param(True, *case, marks=NEEDS_TRITON) for case in pairwise(UNRANKED, USED, NARROW)),
    *((False, *case, torch.float32) for case in pairwise(UNRANKED + RANKED, USED)),
]


@pytest.mark.parametrize(("kernels", "truncation", "of", "dtype"), GRADIENTS, ids=str)
def test_gradients_are_those_of_float64(device, monkeypatch, kernels, truncation, of, dtype) -> None:
    monkeypatch.setattr(head, "WIDTH", 128)  # three stretches of the vocabulary, two blocks of rows
    monkeypatch.setattr(head, "GRADIENT", 128 * 24 * (2 if dtype == torch.bfloat16 else 4))
    hidden, weight, targets = _case(kernels, device, dtype)
    arriving, used = [random(37, seed=seed, device=device) for seed in (7, 8)], USED[of]
    master, ours = weight.float().clone().requires_grad_(), hidden.clone().requires_grad_()
    outputs = _computed(kernels, ours, master, weight, targets, truncation)
    torch.autograd.backward([outputs[i] for i in used], [arriving[i] for i in used])

    exact, wide = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logp, entropy, drawn, _ = _exact(exact, wide, targets, truncation)
    sum(((logp * drawn, entropy)[i] * arriving[i].double()).sum() for i in used).backward()
    assert ours.grad.dtype == dtype and master.grad.dtype == torch.float32
    # bf16 rounds the logits' gradient (2^-9 of each, root mean square less), float16 only the hidden states' (2^-11)
    states, of_weight = {torch.bfloat16: (4e-3, 4e-3), torch.float16: (5e-4, 2e-5), torch.float32: (2e-5, 2e-5)}[dtype]
    assert relative_error(ours.grad, exact.grad) < states
    assert relative_error(master.grad, wide.grad) < of_weight
    assert truncation.active == bool((~drawn).any()), "the case has cut targets if there is truncation"
    if of == "logp":
        assert torch.equal(ours.grad[~drawn], torch.zeros_like(ours.grad[~drawn]))


@pytest.mark.parametrize("kernels", BY)
def test_a_cut_target_hides_a_nan_that_arrives(device, kernels) -> None:
    hidden, weight, targets = _case(kernels, device)
    ours = hidden.clone().requires_grad_()
    logp, _ = _computed(kernels, ours, None, weight, targets, Truncation(min_p=0.05))
    cut = torch.isneginf(logp)
    logp.backward(torch.full((37,), torch.nan, device=device))
    assert cut.any() and torch.equal(ours.grad[cut], torch.zeros_like(ours.grad[cut]))
    assert ours.grad[~cut].isnan().all()


@pytest.mark.parametrize("kernels", BY)
def test_the_weights_gradient_is_added_where_it_is_summed(device, kernels) -> None:
    hidden, weight, targets = _case(kernels, device)

    def backward(master: Tensor, sum_of, rows: slice = slice(None)) -> None:
        given = hidden[rows], master, weight, targets[rows], Truncation(min_p=0.05)
        logp, entropy = _computed(kernels, *given, sum_of=sum_of)
        (logp[logp.isfinite()].sum() + entropy.sum()).backward()

    alone, master, other = (weight.float().clone().requires_grad_() for _ in range(3))
    backward(alone, None)
    total = random(300, 48, seed=4, device=device)
    before = total.clone()
    backward(master, {master: total}.get)
    assert master.grad is None
    if kernels:
        torch.testing.assert_close(total, before + alone.grad, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(total, before + alone.grad), "the bits that autograd would add"
    after = total.clone()
    backward(other, {weight: total}.get)
    assert torch.equal(other.grad, alone.grad) and torch.equal(total, after), "a master that is not summed"
    none = weight.float().clone().requires_grad_()
    backward(none, None, slice(0, 0))
    assert not none.grad.any(), "no rows give a gradient of zeros"


@pytest.mark.parametrize("truncation", [Truncation(temperature=0.7), UNRANKED[-1], RANKED[-1]], ids=str)
def test_a_rows_bits_are_its_own(device, truncation) -> None:
    hidden, weight, targets = _case(False, device, torch.float32)

    def whole(chunk: int):
        return lambda states, ids: token_logprobs(
            states, None, weight, ids[:, 0].contiguous(), truncation, chunk, False
        )

    assert_rows_are_their_own(whole(7), hidden, targets[:, None])
    for chunk in (1, 2, 3, 5, 8, 31, 37):
        for found, expected in zip(
            whole(chunk)(hidden, targets[:, None]), whole(7)(hidden, targets[:, None]), strict=True
        ):
            assert torch.equal(found, expected)


@NEEDS_TRITON
@pytest.mark.parametrize("truncation", [Truncation(temperature=0.7), Truncation(min_p=0.05)], ids=str)
def test_a_rows_bits_are_its_own_in_the_kernels(device, monkeypatch, truncation) -> None:
    hidden, weight, targets = _case(True, device, rows=150, features=16)

    def statistics(hidden: Tensor, targets: Tensor) -> list[Tensor]:
        found, mass = head.statistics(hidden, weight, targets[:, 0].contiguous(), Logits.of(truncation))
        return [*vars(found).values(), *([] if mass is None else [mass])]

    assert_rows_are_their_own(statistics, hidden, targets[:, None])
    whole = statistics(hidden, targets[:, None])
    monkeypatch.setattr(head, "PARTIAL", 1)  # rows go by in blocks of 128
    again = statistics(hidden, targets[:, None])
    assert all(map(torch.equal, again, whole))
    expected = gemm.dense(hidden, weight, out_dtype=torch.float32).amax(-1) / truncation.divisor
    torch.testing.assert_close(whole[3], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("vocabulary", [61, 259, 4099])
def test_the_samplers_log_probs_have_the_learners_bits(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 16, generator=generator) for n in (100, vocabulary))
    targets = torch.randint(0, vocabulary, (100,), generator=generator)
    learner, _ = token_logprobs(hidden, None, weight, targets, RANKED[-1], 64)
    for batch in (1, 2, 3, 5, 7, 8, 31, 33, 63):
        sampler = log_probs_of(logits_of(hidden[37 : 37 + batch], weight), RANKED[-1])
        found = sampler.gather(-1, targets[37 : 37 + batch, None])[:, 0]
        drawn = found > -CUT_LOGIT_GAP / 2  # the sampler draws none of the others
        assert torch.equal(found[drawn], learner[37 : 37 + batch][drawn])
        assert torch.isneginf(learner[37 : 37 + batch][~drawn]).all()


@pytest.mark.parametrize(
    ("probabilities", "truncation", "cut"),
    [
        ([0.1, 0.8, 0.1], Truncation(top_k=1, top_p=1e-6, min_p=0.999), [True, False, True]),  # the likeliest stays
        ([0.5, 0.3, 0.15, 0.05], Truncation(top_p=0.75), [False, False, True, True]),  # and what reaches the bound
        ([0.6, 0.15, 0.15, 0.1], Truncation(top_k=2), [False, False, False, True]),  # and ties with the last one
        ([0.5, 0.3, 0.15, 0.05], Truncation(min_p=0.25), [False, False, False, True]),  # relative to the likeliest
    ],
)
def test_edges_of_truncation(probabilities: list[float], truncation: Truncation, cut: list[bool]) -> None:
    logits = torch.tensor([probabilities]).log()
    logp = log_probs_of(logits.clone(), truncation)
    assert truncate_(logits, truncation).tolist() == [cut]
    assert ((logp[torch.tensor([cut])] + CUT_LOGIT_GAP).abs() < 1).all(), "a cut token keeps a finite log-prob"
