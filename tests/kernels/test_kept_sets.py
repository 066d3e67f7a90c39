"""Kept sets of top-k and top-p: storage, and log-probs that replay them at the same logits and at others."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qarl_kernels.logprob import Truncation, token_logprobs
from qarl_kernels.truncation import KeptSets, Recording, Replay

RANKED = [Truncation(top_k=5), Truncation(0.7, top_p=0.8), Truncation(1.3, top_k=40, top_p=0.95, min_p=0.001)]


def masks(seed: int, rows: int, vocabulary: int) -> torch.Tensor:
    """Masks of cut tokens, bool (rows, vocabulary), from a single token kept to all of them."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(rows, 1, generator=generator) ** 4
    cut = torch.rand(rows, vocabulary, generator=generator) > share
    return cut.scatter(-1, torch.randint(vocabulary, (rows, 1), generator=generator), False)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    vocabulary=st.sampled_from([1, 7, 8, 31, 64, 259, 1000]),
)
def test_sets_come_back_whole_and_by_response_and_take_no_more_than_a_bitmask(seed, lengths, vocabulary):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cut = masks(seed, sum(lengths), vocabulary).to(device)
    kept = KeptSets.of(cut)
    assert torch.equal(kept.cut(vocabulary, device), cut)
    parts = kept.split(lengths)
    for part, expected in zip(parts, cut.split(lengths), strict=True):
        assert torch.equal(part.cut(vocabulary, device), expected)
    again = KeptSets.cat(parts)
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))
    size = sum(x.numel() * x.element_size() for x in (kept.ids, kept.bits))
    assert size <= sum(min(4 * int((~row).sum()), -(-vocabulary // 8)) for row in cut)


@pytest.mark.parametrize("truncation", RANKED, ids=str)
@pytest.mark.parametrize("vocabulary", [61, 500])
def test_a_replay_at_the_same_logits_has_the_same_bits_and_at_moved_ones_the_old_sets(device, truncation, vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    hidden = torch.randn(33, 16, generator=generator).to(device)
    weight = (0.7 * torch.randn(vocabulary, 16, generator=generator)).to(device)
    moved = hidden + 0.3 * torch.randn(33, 16, generator=generator).to(device)
    logits = hidden.double() @ weight.double().t() / truncation.temperature
    targets = logits.argsort(-1, descending=True)[:, 2]  # in some rows it is cut

    def computed(states: torch.Tensor, how: Truncation) -> list[torch.Tensor]:
        states, master = states.clone().requires_grad_(), weight.clone().requires_grad_()
        logp, entropy = token_logprobs(states, master, weight, targets, how, 7)
        finite = logp.masked_fill(logp.isinf(), 0.0).sum() + 0.1 * entropy.sum()
        return [logp, entropy, *torch.autograd.grad(finite, (states, master))]

    recording = Recording.of(truncation)
    own, recorded = computed(hidden, truncation), computed(hidden, recording)
    kept = KeptSets.cat(recording.into)
    replay = Replay.of(truncation, kept)
    for one, two, three in zip(own, recorded, computed(hidden, replay), strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)

    cut = kept.cut(vocabulary, device)
    assert cut.any()
    assert not torch.equal(computed(moved, truncation)[0].isinf(), own[0].isinf())  # the learner's own set moved
    states = moved.double().requires_grad_()
    expected = (states @ weight.double().t() / truncation.temperature).masked_fill(cut, -torch.inf).log_softmax(-1)
    inside = ~cut.gather(-1, targets[:, None])[:, 0]
    entropy = -(expected.exp() * expected.masked_fill(cut, 0.0)).sum(-1)
    logp = expected.gather(-1, targets[:, None])[:, 0]
    (logp[inside].sum() + 0.1 * entropy.sum()).backward()
    found = computed(moved, replay)
    assert torch.equal(found[0].isinf(), ~inside)
    torch.testing.assert_close(found[0][inside].double(), logp[inside], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1].double(), entropy, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[2].double(), states.grad, rtol=1e-3, atol=1e-3)
