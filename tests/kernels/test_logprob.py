"""Token log-probs, their gradients and the sampler's truncation, against float64 transcriptions."""

import pytest
import torch
from qarl_kernels.logprob import CUT_LOGIT_GAP, Truncation, log_probs_of, logits_of, token_logprobs, truncate_
from torch import Tensor

R, H, V = 33, 16, 61
TRUNCATIONS = [
    Truncation(),
    Truncation(temperature=0.7),
    Truncation(top_k=5),
    Truncation(top_p=0.8),
    Truncation(min_p=0.05),
    Truncation(temperature=1.3, top_k=20, top_p=0.9, min_p=0.01),
]


def _case(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(R, H, generator=generator)
    weight = torch.randn(V, H, generator=generator) * 0.7
    return hidden, weight, torch.randint(0, V, (R,), generator=generator)


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


def _logprobs64(hidden: Tensor, weight: Tensor, targets: Tensor, t: Truncation) -> tuple[Tensor, Tensor, Tensor]:
    """(log-prob of targets, entropy, kept) in float64, differentiable; a token cut off is a constant."""
    logits = hidden @ weight.t() / t.temperature
    kept = torch.stack([_kept(row, t) for row in logits.detach()])
    top = logits.detach().amax(-1, keepdim=True)
    logp = torch.where(kept, logits, top - CUT_LOGIT_GAP).log_softmax(-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1), kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_logprob_and_entropy_are_those_of_the_truncated_distribution(truncation: Truncation, dtype) -> None:
    hidden, weight, targets = _case()
    hidden = hidden.to(dtype)
    logp, entropy = token_logprobs(hidden, None, weight, targets, truncation, 7)
    expected, expected_entropy, kept = _logprobs64(hidden.double(), weight.double(), targets, truncation)
    drawn = kept.gather(-1, targets[:, None])[:, 0]
    assert logp.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logp[drawn].double(), expected[drawn], rtol=1e-5, atol=1e-5)
    assert torch.isneginf(logp[~drawn]).all() and truncation.active == bool((~drawn).any())
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=["logp", "entropy", "both"])
@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_gradients_are_those_of_float64_and_zero_for_a_cut_target(truncation: Truncation, used: tuple[int]) -> None:
    hidden, weight, targets = _case()
    grads = torch.randn(2, R, generator=torch.Generator().manual_seed(9))
    master, ours = weight.clone().requires_grad_(), hidden.clone().requires_grad_()
    outputs = token_logprobs(ours, master, weight, targets, truncation, 7)
    torch.autograd.backward([outputs[i] for i in used], [grads[i] for i in used])

    hidden64, weight64 = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logp, entropy, kept = _logprobs64(hidden64, weight64, targets, truncation)
    drawn = kept.gather(-1, targets[:, None])[:, 0]
    exact = logp * drawn, entropy
    sum((exact[i] * grads[i].double()).sum() for i in used).backward()
    torch.testing.assert_close(ours.grad.double(), hidden64.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(master.grad.double(), weight64.grad, rtol=1e-4, atol=1e-5)
    assert truncation.active == bool((~drawn).any()), "the case has cut targets where there is truncation"
    if used == (0,):
        assert torch.equal(ours.grad[~drawn], torch.zeros_like(ours.grad[~drawn]))


def test_a_cut_target_hides_no_nan_of_the_others() -> None:
    hidden, weight, targets = _case()
    ours, truncation = hidden.clone().requires_grad_(), Truncation(top_k=5)
    logp, _ = token_logprobs(ours, None, weight, targets, truncation, 7)
    cut = torch.isneginf(logp)
    logp.backward(torch.full((R,), torch.nan))
    assert torch.equal(ours.grad[cut], torch.zeros_like(ours.grad[cut])) and ours.grad[~cut].isnan().all()


@pytest.mark.parametrize("truncation", [TRUNCATIONS[0], TRUNCATIONS[-1]], ids=str)
def test_bits_do_not_depend_on_the_chunk(truncation: Truncation) -> None:
    hidden, weight, targets = _case()
    whole, whole_entropy = token_logprobs(hidden, None, weight, targets, truncation, R)
    for chunk in (1, 2, 3, 5, 7, 8, 31):
        logp, entropy = token_logprobs(hidden, None, weight, targets, truncation, chunk)
        assert torch.equal(logp, whole) and torch.equal(entropy, whole_entropy)


@pytest.mark.parametrize("vocabulary", [61, 259, 4099])
def test_the_samplers_log_probs_have_the_learners_bits(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(100, H, generator=generator)
    weight = torch.randn(vocabulary, H, generator=generator)
    targets = torch.randint(0, vocabulary, (100,), generator=generator)
    truncation = TRUNCATIONS[-1]
    learner, _ = token_logprobs(hidden, None, weight, targets, truncation, 64)
    for batch in (1, 2, 3, 5, 7, 8, 31, 33, 64):
        sampler = log_probs_of(logits_of(hidden[37 : 37 + batch], weight), truncation)
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


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_the_retained_mass_is_the_probability_of_the_kept_tokens_before_truncation(truncation: Truncation) -> None:
    hidden, weight, targets = _case()
    retained: list[torch.Tensor] = []
    plain = token_logprobs(hidden, None, weight, targets, truncation, 7)
    watched = token_logprobs(hidden, None, weight, targets, truncation, 7, retained=retained)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    if not truncation.active:
        assert retained == []
        return
    before = torch.softmax(hidden.double() @ weight.double().T / truncation.divisor, -1)
    _, _, kept = _logprobs64(hidden.double(), weight.double(), targets, truncation)
    expected = (before * kept).sum(-1)
    torch.testing.assert_close(retained[0].double(), expected, rtol=2e-6, atol=0)  # float32 sums of a few hundred
    assert retained[0].min() < 1.0


def test_on_the_cpu_a_sum_gets_the_bits_that_autograd_would_add() -> None:
    hidden, weight, targets = _case()
    master, total = weight.clone().requires_grad_(), torch.randn(V, H, generator=torch.Generator().manual_seed(5))
    token_logprobs(hidden, master, weight, targets, Truncation(top_k=5), 7)[0].sum().backward()
    expected = total + master.grad
    master.grad = None
    sums = {master: total}.get
    token_logprobs(hidden, master, weight, targets, Truncation(top_k=5), 7, sum_of=sums)[0].sum().backward()
    assert master.grad is None and torch.equal(total, expected)
    other, unsummed = {weight: total}.get, total.clone()
    token_logprobs(hidden, master, weight, targets, Truncation(top_k=5), 7, sum_of=other)[0].sum().backward()
    assert master.grad.any() and torch.equal(total, unsummed), "a master that is not summed gets it from autograd"
    master.grad = None
    logp, _ = token_logprobs(hidden[:0].requires_grad_(), master, weight, targets[:0], Truncation(), 7)
    logp.sum().backward()
    assert logp.shape == (0,) and not master.grad.any()
