"""The output layer that stores no logits: against float64, against the chunked plain-torch twin, and row by row."""

import math

import pytest
import torch
from pairwise import pairwise
from products import random, relative_error
from qarl_kernels import gemm, head, logprob
from qarl_kernels.head import FusedTokenLogProbs, Logits
from qarl_kernels.launch import INTERPRETED
from qarl_kernels.logprob import CUT_LOGIT_GAP, Truncation, token_logprobs
from qarl_kernels.tuning import Tile
from running import NEEDS_TRITON, QUIET
from torch import Tensor

pytestmark = [NEEDS_TRITON, pytest.mark.usefixtures("poisoned"), QUIET]

# (rows, vocabulary, features): one tile and a bit, one row, whole tiles, features that only pointers can read
SHAPES = [(37, 300, 48), (1, 61, 16), (128, 256, 32), (5, 259, 20)]
TRUNCATIONS = [
    Truncation(),
    Truncation(temperature=0.7),
    Truncation(temperature=0.0),
    Truncation(min_p=0.05),
    Truncation(temperature=1.3, min_p=0.02),
]
DTYPES = [torch.bfloat16, torch.float16]
STATISTICS_TILES = (
    Tile("x_first", 128, 256, 64, warps=8, stages=4, persistent=True),
    Tile("x_first", 128, 256, 64, warps=8, stages=3),
    Tile("x_first", 128, 128, 64, warps=4, stages=3),
    Tile("x_first", 128, 128, 128, warps=8, stages=3),
    Tile("x_first", 128, 128, 64, warps=8, stages=5, persistent=True),
)
GRADIENT_TILES = (
    Tile("x_first", 128, 256, 64, warps=8, stages=3, persistent=True, halves=True),
    Tile("x_first", 128, 128, 64, warps=8, stages=4, persistent=True),
    Tile("x_first", 128, 128, 64, warps=8, stages=3, halves=True),
)


@pytest.fixture(autouse=True)
def tiles_of_its_size(monkeypatch) -> None:
    """The interpreter has tiles of which the small cases here make several."""
    if INTERPRETED:
        monkeypatch.setattr(head, "STATISTICS_TILE", Tile("x_first", 64, 64, 16))
        monkeypatch.setattr(head, "GRADIENT_TILE", Tile("x_first", 64, 64, 16))
        monkeypatch.setattr(head, "GRADIENT_CUT", Tile("x_first", 32, 64, 16))
        monkeypatch.setattr(head, "POINTERS", Tile("x_first", 16, 32, 16))


def _case(rows: int, vocabulary: int, features: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    hidden = random(rows, features, seed=1, device=device, dtype=dtype)
    weight = (random(vocabulary, features, seed=2, device=device) * (2.5 / math.sqrt(features))).to(dtype)
    targets = torch.randint(0, vocabulary, (rows,), generator=torch.Generator().manual_seed(3)).to(device)
    if rows > 2:  # the first and the last token, and the likeliest, which nothing cuts
        targets[0], targets[1] = 0, vocabulary - 1
        targets[2] = (hidden[2].double() @ weight.double().t()).argmax()
    return hidden, weight, targets


def _exact(
    hidden: Tensor, weight: Tensor, targets: Tensor, truncation: Truncation
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In float64: log-prob (a constant where the target is cut), entropy, whether the target is kept, the kept mass."""
    logits = hidden @ weight.t() / truncation.divisor
    before = logits.detach().softmax(-1)
    kept = before >= (truncation.min_p if truncation.active else 0.0) * before.amax(-1, keepdim=True)
    top = logits.detach().amax(-1, keepdim=True)
    logp = torch.where(kept, logits, top - CUT_LOGIT_GAP).log_softmax(-1)
    drawn = kept.gather(-1, targets[:, None])[:, 0]
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1), drawn, (before * kept).sum(-1)


@pytest.mark.parametrize(("shape", "truncation", "dtype"), pairwise(SHAPES, TRUNCATIONS, DTYPES), ids=str)
def test_log_probs_entropies_and_masses_are_those_of_float64(device, dtype, shape, truncation) -> None:
    rows, vocabulary, features = shape
    hidden, weight, targets = _case(rows, vocabulary, features, dtype, device)
    found, mass = head.statistics(hidden, weight, targets, Logits.of(truncation))
    logp, entropy, drawn, kept = _exact(hidden.double(), weight.double(), targets, truncation)
    # float32 sums of K products of magnitude up to 10 and of V exponentials, exp and log of a few ulps
    torch.testing.assert_close(found.logp[drawn].double(), logp[drawn], rtol=1e-5, atol=1e-5)
    assert torch.isneginf(found.logp[~drawn]).all()
    torch.testing.assert_close(found.entropy.double(), entropy, rtol=1e-5, atol=1e-5)
    if not truncation.active:
        assert mass is None and drawn.all()
        return
    torch.testing.assert_close(mass.double(), kept, rtol=1e-5, atol=0)
    assert mass.max() <= 1.0 and (rows < 30 or not drawn.all()), "the case has cut targets"


@pytest.mark.parametrize(("rows", "vocabulary", "features"), SHAPES)
def test_logits_have_the_bits_of_the_product(device, rows, vocabulary, features) -> None:
    hidden, weight, targets = _case(rows, vocabulary, features, torch.bfloat16, device)
    found, _ = head.statistics(hidden, weight, targets, Logits.of(Truncation()))
    expected = gemm.dense(hidden, weight, out_dtype=torch.float32).amax(-1)
    if INTERPRETED:  # numpy's sums depend on the tile, tensor cores' do not
        torch.testing.assert_close(found.largest, expected, rtol=1e-6, atol=0)
    else:
        assert torch.equal(found.largest, expected)


@pytest.mark.parametrize("truncation", [Truncation(temperature=0.7), Truncation(min_p=0.05)], ids=str)
def test_a_rows_bits_are_its_own(device, monkeypatch, truncation) -> None:
    hidden, weight, targets = _case(150, 300, 16, torch.bfloat16, device)
    whole, mass = head.statistics(hidden, weight, targets, Logits.of(truncation))

    def assert_same(start: int, rows: int) -> None:
        part = slice(start, start + rows)
        found, its_mass = head.statistics(hidden[part], weight, targets[part], Logits.of(truncation))
        for name in ("logp", "entropy", "lse", "largest"):
            assert torch.equal(getattr(found, name), getattr(whole, name)[part]), name
        assert mass is None or torch.equal(its_mass, mass[part])

    for start, rows in ((0, 1), (37, 1), (100, 2), (3, 16), (11, 130)):
        assert_same(start, rows)
    monkeypatch.setattr(head, "PARTIAL", 1)  # rows go by in blocks of 128
    assert_same(0, 150)


@pytest.mark.parametrize(
    ("truncation", "gradient_of", "dtype"), pairwise(TRUNCATIONS, ["logp", "entropy", "both"], DTYPES), ids=str
)
def test_gradients_are_those_of_float64(device, monkeypatch, truncation, gradient_of, dtype) -> None:
    monkeypatch.setattr(head, "WIDTH", 128)  # three stretches of the vocabulary, two blocks of rows
    monkeypatch.setattr(head, "GRADIENT", 128 * 24 * (2 if dtype == torch.bfloat16 else 4))
    hidden, weight, targets = _case(37, 300, 48, dtype, device)
    arriving = [random(37, seed=seed, device=device) for seed in (7, 8)]
    used = {"logp": (True, False), "entropy": (False, True), "both": (True, True)}[gradient_of]

    master, ours = weight.float().requires_grad_(), hidden.clone().requires_grad_()
    outputs = FusedTokenLogProbs.apply(ours, master, weight, targets, truncation, None, None)
    chosen = [(output, grad) for output, grad, use in zip(outputs, arriving, used, strict=True) if use]
    torch.autograd.backward([output for output, _ in chosen], [grad for _, grad in chosen])

    exact, wide = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logp, entropy, drawn, _ = _exact(exact, wide, targets, truncation)
    loss = (logp * arriving[0].double() * drawn).sum() * used[0] + (entropy * arriving[1].double()).sum() * used[1]
    loss.backward()
    assert ours.grad.dtype == dtype and master.grad.dtype == torch.float32
    # bf16 rounds the logits' gradient (2^-9 of each, root mean square less), float16 only the hidden states' (2^-11)
    assert relative_error(ours.grad, exact.grad) < (4e-3 if dtype == torch.bfloat16 else 5e-4)
    assert relative_error(master.grad, wide.grad) < (4e-3 if dtype == torch.bfloat16 else 2e-5)
    if gradient_of == "logp":
        assert torch.equal(ours.grad[~drawn], torch.zeros_like(ours.grad[~drawn]))


def test_a_cut_target_hides_a_nan_that_arrives(device) -> None:
    hidden, weight, targets = _case(37, 300, 48, torch.bfloat16, device)
    ours = hidden.clone().requires_grad_()
    logp, _ = FusedTokenLogProbs.apply(ours, None, weight, targets, Truncation(min_p=0.05), None, None)
    cut = torch.isneginf(logp)
    logp.backward(torch.full((37,), torch.nan, device=device))
    assert cut.any() and torch.equal(ours.grad[cut], torch.zeros_like(ours.grad[cut]))
    assert ours.grad[~cut].isnan().all()


def test_a_row_that_is_not_finite_spoils_only_itself(device) -> None:
    hidden, weight, targets = _case(37, 300, 48, torch.bfloat16, device)
    hidden[4, 3] = torch.nan
    found, _ = head.statistics(hidden, weight, targets, Logits.of(Truncation()))
    finite = torch.arange(37, device=device) != 4
    assert found.logp[4].isnan() and found.entropy[4].isnan()
    assert found.logp[finite].isfinite().all() and found.entropy[finite].isfinite().all()


@pytest.mark.parametrize("taken", [True, False])
def test_the_weights_gradient_is_added_where_it_is_summed(device, taken: bool) -> None:
    hidden, weight, targets = _case(37, 300, 48, torch.bfloat16, device)
    alone, master = weight.float().requires_grad_(), weight.float().requires_grad_()
    FusedTokenLogProbs.apply(hidden, alone, weight, targets, Truncation(), None, None)[0].sum().backward()
    total = random(300, 48, seed=4, device=device)
    before = total.clone()

    def sum_of(asked: Tensor) -> Tensor | None:
        assert asked is master
        return total if taken else None

    FusedTokenLogProbs.apply(hidden, master, weight, targets, Truncation(), None, sum_of)[0].sum().backward()
    if taken:
        assert master.grad is None
        torch.testing.assert_close(total, before + alone.grad, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(master.grad, alone.grad) and torch.equal(total, before)


def test_a_master_without_gradient_costs_no_product_and_no_rows_give_it_zeros(device, monkeypatch) -> None:
    products = []
    original = head.weight_grad
    monkeypatch.setattr(head, "weight_grad", lambda *a, **k: products.append(a[0].shape) or original(*a, **k))
    hidden, weight, targets = _case(37, 300, 48, torch.bfloat16, device)
    for master, count in ((None, 1), (weight.float(), 1), (weight.float().requires_grad_(), 2)):
        products.clear()
        ours = hidden.clone().requires_grad_()
        FusedTokenLogProbs.apply(ours, master, weight, targets, Truncation(), None, None)[0].sum().backward()
        assert len(products) == count
    none = hidden[:0].requires_grad_()
    master = weight.float().requires_grad_()
    logp, entropy = FusedTokenLogProbs.apply(none, master, weight, targets[:0], Truncation(), None, None)
    (logp.sum() + entropy.sum()).backward()
    assert logp.shape == (0,) and none.grad.shape == (0, 48) and not master.grad.any()


@pytest.mark.parametrize("truncation", [*TRUNCATIONS, Truncation(top_k=5), Truncation(top_p=0.9)], ids=str)
def test_what_is_ranked_stays_with_the_chunks(device, monkeypatch, truncation) -> None:
    seen = []
    original = FusedTokenLogProbs.apply
    monkeypatch.setattr(FusedTokenLogProbs, "apply", lambda *a: seen.append(True) or original(*a))
    hidden, weight, targets = _case(5, 259, 16, torch.bfloat16, device)
    ranked = truncation.top_k > 0 or truncation.top_p < 1.0
    for kernels in (True, False):
        seen.clear()
        wide = weight.float() if device.type == "cpu" else weight
        retained: list[Tensor] = []
        logp, _ = token_logprobs(hidden, None, wide, targets, truncation, 3, kernels, retained)
        assert bool(seen) == (kernels and device.type == "cuda" and not ranked)
        assert logp.shape == (5,) and len(retained) == truncation.active
    assert not logprob.fused(hidden.float(), weight, truncation)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory and compiled tiles are a GPU's")
def test_on_a_gpu_tiles_agree_and_memory_stays_bounded(monkeypatch, device) -> None:
    hidden, weight, targets = _case(1000, 50_000, 512, torch.bfloat16, device)
    logits = Logits.of(Truncation())
    expected = head.statistics(hidden, weight, targets, logits)[0]
    for tile in STATISTICS_TILES:
        monkeypatch.setattr(head, "STATISTICS_TILE", tile)
        found = head.statistics(hidden, weight, targets, logits)[0]
        assert torch.equal(found.largest, expected.largest)
        torch.testing.assert_close(found.logp, expected.logp, rtol=1e-5, atol=1e-5)
        single = head.statistics(hidden[77:78], weight, targets[77:78], logits)[0]
        assert torch.equal(single.logp, found.logp[77:78]) and torch.equal(single.entropy, found.entropy[77:78])
    grad = random(1000, seed=5, device=device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    whole = head.gradients(hidden, weight, targets, logits, expected, grad, grad, None)
    assert torch.cuda.max_memory_allocated() - before < 64 << 20, "the logits alone are 200 MB"
    for tile in GRADIENT_TILES:
        monkeypatch.setattr(head, "GRADIENT_TILE", tile)
        found = head.gradients(hidden, weight, targets, logits, expected, grad, grad, None)
        assert relative_error(found, whole) < 1e-3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU can be waited for")
@pytest.mark.parametrize("truncation", [Truncation(temperature=0.7), Truncation(min_p=0.05)], ids=str)
def test_on_a_gpu_nothing_waits_for_it(device, truncation) -> None:
    hidden, weight, targets = _case(300, 20_000, 256, torch.bfloat16, device)
    master, ours = weight.float().requires_grad_(), hidden.clone().requires_grad_()
    for mode in ("default", "error"):  # kernels are compiled first
        torch.cuda.set_sync_debug_mode(mode)
        try:
            logp, entropy = token_logprobs(ours, master, weight, targets, truncation, 64)
            torch.autograd.backward([logp, entropy], [torch.ones_like(logp), torch.ones_like(entropy)])
        finally:
            torch.cuda.set_sync_debug_mode("default")
