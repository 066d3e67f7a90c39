"""The gradients of the precision split against independent losses, and that making them leaves no trace."""

import math
from dataclasses import replace

import pytest
import torch
from tiny_runs import Parts, parts
from watched import QUANTIZED_ROLLOUT, mostly_live, packed, shadow

from qarl.batch.batch import Batch
from qarl.diagnostics.gradient_passes import Passes, trained_gram
from qarl.diagnostics.gradients import trained_metrics
from qarl.objectives.base import Band
from qarl.objectives.common import TokenLogProbs
from qarl.objectives.segments import Totals, aggregate

pytestmark = pytest.mark.usefixtures("one_thread")


def gram_of(run: Parts, batch: Batch, tokens: int = 10_000, band: Band | None = None) -> torch.Tensor:
    whole = batch.whole()
    return Passes(
        run.policy, whole.micro_batches(tokens), whole.tokens, run.sampling.truncation, 64, run.config.loss_scale, band
    ).gram()


def test_the_four_gradients_are_those_of_four_losses(llama):
    run = parts(llama, **QUANTIZED_ROLLOUT, model={"learner_dtype": "float32", "dtype": "float32"}, optim={"lr": 1e-2})
    batch = mostly_live(run)
    run.learn(mostly_live(run, 5))  # so that alpha is not 0
    count = sum(len(r) for r in batch.responses)
    advantages = torch.cat(
        [torch.full((len(r),), a) for r, a in zip(batch.responses, batch.advantages.tolist(), strict=True)]
    )
    sampler, masters = packed(batch.logp_sampler), [p for _, p in run.policy.named_parameters()]
    gradients = []
    for full in (False, True):
        for by_shadow in (True, False):
            with torch.enable_grad():
                texts = batch.prompts, batch.responses, run.sampling.truncation, 128
                logp, _ = run.policy.logprobs(*texts, weights=run.policy.shadow if by_shadow else None)
                q = shadow(run, batch)
                now = run.policy.logprobs(batch.prompts, batch.responses, run.sampling.truncation, 128)[0].detach()
                ratio = ((now if full else q) - sampler).exp()
                loss = -(advantages * ratio * logp).sum() / count
            gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, masters)]).double())
    rows = torch.stack(gradients)
    gram = gram_of(run, batch)
    assert gram.dtype == torch.float64 and torch.equal(gram, gram.t())
    torch.testing.assert_close(gram, rows @ rows.t(), rtol=1e-4, atol=0)
    torch.testing.assert_close(gram_of(run, batch, 40), gram, rtol=1e-4, atol=0)
    assert float(gram[0, 0]) != float(gram[1, 1]) != float(gram[2, 2])


BANDS = {"clips some": Band("token", 1.1, 0.9), "clips responses": Band("sequence", 1.01, 0.99, 1.05)}


@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
def test_the_clipped_gradients_are_those_of_the_losses_with_the_clip_indicator_restored(llama, band):
    run = parts(llama, **QUANTIZED_ROLLOUT, model={"learner_dtype": "float32", "dtype": "float32"}, optim={"lr": 1e-2})
    batch = mostly_live(run)
    run.learn(mostly_live(run, 5))
    lengths = [len(r) for r in batch.responses]
    sampler, q = packed(batch.logp_sampler), shadow(run, batch)
    with torch.enable_grad():
        logp, _ = run.policy.logprobs(batch.prompts, batch.responses, run.sampling.truncation, 128)
        losses = []
        for clips in (None, logp.detach() - sampler, q - sampler):
            total, start = 0.0, 0
            for length, a in zip(lengths, batch.advantages.tolist(), strict=True):
                for t in range(start, start + length):
                    row = slice(start, start + length) if band.level == "sequence" else slice(t, t + 1)
                    r = 1.0 if clips is None else math.exp(float(clips[row].double().mean()))
                    lost = r > band.high if a > 0 else a < 0 and (r < band.low or r > band.neg_high)
                    if clips is None or not lost:
                        total = total - a * (logp[t].detach() - sampler[t]).exp() * logp[t] / sum(lengths)
                start += length
            losses.append(total)
        masters = [p for _, p in run.policy.named_parameters()]
        d, e, f = (
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, masters, retain_graph=True)]).double()
            if isinstance(loss, torch.Tensor)
            else torch.zeros(sum(p.numel() for p in masters), dtype=torch.float64)
            for loss in losses
        )
    gram = gram_of(run, batch, band=band)
    rows = torch.stack([d, e, f])
    scale = float(d @ d)
    torch.testing.assert_close(gram[3:, 3:], rows @ rows.t(), rtol=1e-4, atol=1e-6 * scale)
    torch.testing.assert_close(gram[:4, :4], gram_of(run, batch), rtol=1e-6, atol=0)
    torch.testing.assert_close(gram_of(run, batch, 40, band), gram, rtol=1e-4, atol=1e-6 * scale)


@pytest.mark.parametrize(
    "sections",
    [
        {"objective": {"name": "grpo", "ratio": "rollout", "clip_ratio_low": 0.01, "teacher": {"path": "unread"}}},
        {"objective": {"name": "dapo", "loss": "detach_center", "ratio": "shadow", "entropy_coef": 0.1}},
        {"objective": {"name": "grpo"}, "correction": {"level": "token", "normalize": True, "upper": 1.0}},
        {"objective": {"name": "reinforce"}},
    ],
    ids=["rollout ratio beside a teacher", "centred shadow ratio", "weighted and stale", "reinforce"],
)
def test_the_trained_gradient_is_that_of_the_configured_loss_and_the_clean_one_is_reinforce(llama, sections):
    exact = {"learner_dtype": "float32", "dtype": "float32"}
    run = parts(llama, **QUANTIZED_ROLLOUT, model=exact, **sections)
    batch, objective = mostly_live(run), run.learner.objective
    whole, masters = batch.whole(), [p for _, p in run.policy.named_parameters()]
    if stale := "correction" in sections:  # logp_old is that of an earlier version
        batch.logp_old.fill(whole, whole.logp_sampler * 1.01)
    totals = Totals(len(whole), whole.tokens, run.config.rollout.max_response_length)
    passes = Passes(run.policy, [], whole.tokens, run.sampling.truncation, 64, 8.0)
    gram, signs = trained_gram(passes, objective, whole.micro_batches(40), totals)

    logp, _ = run.policy.logprobs(batch.prompts, batch.responses, run.sampling.truncation, 128)
    logps = TokenLogProbs(
        logp, whole.logp_old if stale else logp.detach(), packed(batch.logp_sampler), shadow(run, batch)
    )
    plain = replace(objective, config=objective.config.model_copy(update={"entropy_coef": 0.0, "teacher": None}))
    rest = whole.advantages, whole.segments
    loss, _ = plain(logps, *rest, totals, plain.constants(replace(logps, logp=logp.detach()), *rest))
    value = whole.segments.expand(whole.advantages) * logp
    clean = -aggregate(value, whole.segments, objective.config.aggregation, totals)
    rows = torch.stack(
        [
            torch.cat([g.flatten() for g in torch.autograd.grad(one, masters, retain_graph=True)]).double()
            for one in (loss, clean)
        ]
    )
    torch.testing.assert_close(gram, rows @ rows.t(), rtol=1e-4, atol=0)
    own = torch.cat([signs[name].flatten() for name, _ in run.policy.named_parameters()])
    assert float((own == rows[1].sign()).double().mean()) > 0.999
    found = trained_metrics(gram)
    assert found["gradients/cos_trained"] == pytest.approx(
        float(torch.cosine_similarity(rows[0], rows[1], dim=0)), abs=1e-5
    )
    expected = float((rows[0] - rows[1]).norm() / rows[1].norm())
    assert found["gradients/trained_rel"] == pytest.approx(expected, rel=1e-3, abs=1e-4)
    if sections["objective"]["name"] == "reinforce":
        assert expected < 1e-5
    else:
        assert expected > 1e-3
    assert all(master.grad is None for master in masters)


def test_the_trained_gradient_has_no_metrics_without_a_clean_one():
    assert trained_metrics(torch.zeros(2, 2)) == {}
    assert trained_metrics(torch.tensor([[0.0, 0.0], [0.0, 4.0]])) == {"gradients/trained_rel": 1.0}
