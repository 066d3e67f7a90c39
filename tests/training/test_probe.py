"""The probe: its numbers against independent ones, and that it leaves no trace in the run."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_runs import Parts, live, parts

from qarl.config.diagnostics import COSTLY
from qarl.training.batch import Batch, micro_batches
from qarl.training.four_passes import four_pass_gram

pytestmark = pytest.mark.usefixtures("one_thread")

QUANTIZED_ROLLOUT = {"quant": {"scheme": "w8a8", "group_size": None, "learner": "full_precision"}}


def mostly_live(run: Parts, seed: int = 1) -> Batch:
    """As `live`, with one response of advantage 0."""
    batch = live(run, seed)
    batch.advantages[3] = 0.0
    return batch


def packed(values) -> torch.Tensor:
    return torch.cat(list(values))


def shadow(run: Parts, batch: Batch) -> torch.Tensor:
    everything = list(range(len(batch)))
    return run.policy.shadow_logprobs(*batch.texts(everything), run.sampling.truncation, 128)


@pytest.mark.parametrize("scheme, group", [("bf16", None), ("w8a8", None), ("w4a16", 32), ("fp8", None), ("w4a8", 32)])
def test_the_shadow_of_the_snapshot_is_what_the_native_sampler_reported_bit_for_bit(llama, scheme, group):
    quant = {"scheme": scheme, "group_size": group, "learner": "full_precision"}
    run = parts(llama, quant=quant, model={"learner_dtype": "float32"})
    batch = mostly_live(run)
    assert torch.equal(shadow(run, batch), packed(batch.logp_sampler))
    everything = list(range(len(batch)))
    learner, _ = run.policy.logprobs(*batch.texts(everything), run.sampling.truncation, 128)
    assert not torch.equal(learner.detach(), packed(batch.logp_sampler))


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {**QUANTIZED_ROLLOUT, "model": {"learner_dtype": "float32"}},
        {**QUANTIZED_ROLLOUT, "objective": {"name": "gspo", "ratio": "shadow"}, "train": {"epochs": 2}},
    ],
    ids=["aligned", "float32", "shadow_ratio"],
)
def test_a_probe_changes_no_bit_of_the_run(llama, sections):
    found = []
    for due in ((), COSTLY):
        run, metrics = parts(llama, **sections), []
        for step in range(2):
            metrics.append(run.learn(mostly_live(run, step), step, run.probe(*due) if due else None))
        found.append((metrics, run.masters(), run.optimizer.state_tensors()[0], run.policy.current.manifest()))
    (metrics, masters, state, manifest), (probed, probed_masters, probed_state, probed_manifest) = found
    assert metrics == probed and manifest == probed_manifest
    assert all(torch.equal(masters[name], probed_masters[name]) for name in masters)
    assert all(torch.equal(state[name], probed_state[name]) for name in state)


def test_precision_is_split_at_every_training_forward(llama):
    run = parts(llama, **QUANTIZED_ROLLOUT, optim={"lr": 1e-2})
    batch, probe = mostly_live(run), run.probe("shadow")
    at_start = shadow(run, batch)
    run.learn(batch, 0, probe)
    tokens = probe.tokens(batch)
    # The first minibatch ran at the snapshot, where the shadow is the sampler; the second one step later.
    first = [i in probe._passes[0] for i in range(len(batch))]
    alpha = (tokens.logp_shadow - tokens.logp_sampler).split([len(r) for r in batch.responses])
    assert all(float(a.abs().max()) == 0.0 for a, early in zip(alpha, first, strict=True) if early)
    assert any(float(a.abs().max()) > 0.0 for a, early in zip(alpha, first, strict=True) if not early)
    assert torch.equal(at_start, tokens.logp_sampler)
    beta = (tokens.logp - tokens.logp_shadow).double().abs()
    assert probe.metrics["precision/beta_abs_mean"] == pytest.approx(float(beta.mean()), rel=1e-6)
    assert probe.metrics["precision/beta_abs_max"] == pytest.approx(float(beta.max()), rel=1e-6)
    assert probe.metrics["precision/snr"] > 0.0
    assert torch.equal(tokens.logp, packed(batch.logp)) and tokens.band.high == 1.2 and tokens.weights is None
    assert torch.equal(tokens.log_ratio, tokens.logp - tokens.logp_old)


def test_an_aligned_learner_has_no_precision_gap(llama):
    run = parts(llama)
    batch, probe = mostly_live(run), run.probe(*COSTLY)
    run.learn(batch, 0, probe)
    found = probe.metrics
    assert found["precision/beta_abs_max"] == found["precision/phantom_frac"] == found["gradients/total_rel"] == 0.0
    assert found["gradients/cos_total"] == pytest.approx(1.0) and "gradients/cos_ratio_score" not in found


def test_tokens_hold_the_correction_weights_of_the_last_forward(llama):
    correction = {"level": "token", "mode": "truncate", "upper": 1.01}
    run = parts(llama, **QUANTIZED_ROLLOUT, correction=correction, train={"epochs": 2, "micro_batch_tokens": 40})
    batch, probe = mostly_live(run), run.probe()
    run.learn(batch, 0, probe)
    tokens = probe.tokens(batch)
    assert tokens.logp_shadow is None and probe.metrics == {}
    expected = (tokens.logp_old.double() - tokens.logp_sampler.double()).exp().clamp(max=1.01)
    torch.testing.assert_close(tokens.weights.double(), expected, rtol=1e-6, atol=0)
    assert not torch.equal(tokens.logp, tokens.logp_old)


def test_deployed_improvement_is_that_of_the_shadow_before_and_after(llama):
    for learner in ("aligned", "full_precision"):
        run = parts(llama, quant={"learner": learner}, optim={"lr": 1e-2}, train={"micro_batch_tokens": 30})
        batch, probe = mostly_live(run), run.probe("deployed")
        before = shadow(run, batch)
        run.learn(batch, 0, probe)
        moved = (shadow(run, batch) - before).double()
        signs = torch.cat([torch.full((len(r),), math.copysign(1.0, a) if a else 0.0)
                           for r, a in zip(batch.responses, batch.advantages.tolist(), strict=True)])  # fmt: skip
        assert probe.metrics["deployed/improvement"] == pytest.approx(float((signs * moved).mean()), rel=1e-9)
        assert probe.metrics["deployed/delta_abs_mean"] == pytest.approx(float(moved.abs().mean()), rel=1e-9)


def test_a_step_that_moved_nothing_improved_nothing(llama):
    run = parts(llama, **QUANTIZED_ROLLOUT)
    batch, probe = run.batch(lambda tokens: 1.0), run.probe(*COSTLY)
    run.learn(batch, 0, probe)
    assert probe.metrics["deployed/delta_abs_mean"] == 0.0
    assert not any(name.startswith("gradients/") for name in probe.metrics), "no advantage, no gradient"


# --- the four passes


def gram_of(run: Parts, batch: Batch, tokens: int = 10_000) -> torch.Tensor:
    everything = list(range(len(batch)))
    count = sum(len(r) for r in batch.responses)
    parts_ = micro_batches(batch, everything, tokens)
    return four_pass_gram(run.policy, batch, parts_, count, run.sampling.truncation, 64, run.config.loss_scale)


def test_the_four_gradients_are_those_of_four_losses(llama):
    run = parts(llama, **QUANTIZED_ROLLOUT, model={"learner_dtype": "float32", "dtype": "float32"}, optim={"lr": 1e-2})
    batch = mostly_live(run)
    run.learn(mostly_live(run, 5))  # so that alpha is not 0
    everything, count = list(range(len(batch))), sum(len(r) for r in batch.responses)
    advantages = torch.cat([torch.full((len(r),), a)
                            for r, a in zip(batch.responses, batch.advantages.tolist(), strict=True)])  # fmt: skip
    sampler, masters = packed(batch.logp_sampler), [p for _, p in run.policy.named_parameters()]
    gradients = []
    for full in (False, True):
        for by_shadow in (True, False):
            with torch.enable_grad():
                if by_shadow:
                    with run.policy.shadow():
                        logp, _ = run.policy.logprobs(*batch.texts(everything), run.sampling.truncation, 128)
                else:
                    logp, _ = run.policy.logprobs(*batch.texts(everything), run.sampling.truncation, 128)
                q = shadow(run, batch)
                now = run.policy.logprobs(*batch.texts(everything), run.sampling.truncation, 128)[0].detach()
                ratio = ((now if full else q) - sampler).exp()
                loss = -(advantages * ratio * logp).sum() / count
            gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, masters)]).double())
    rows = torch.stack(gradients)
    gram = gram_of(run, batch)
    assert gram.dtype == torch.float64 and torch.equal(gram, gram.t())
    torch.testing.assert_close(gram, rows @ rows.t(), rtol=1e-4, atol=0)
    torch.testing.assert_close(gram_of(run, batch, 40), gram, rtol=1e-4, atol=0)
    assert float(gram[0, 0]) != float(gram[1, 1]) != float(gram[2, 2])


def test_the_four_passes_leave_gradients_and_shadow_as_they_were(llama):
    run = parts(llama, **QUANTIZED_ROLLOUT)
    batch = mostly_live(run)
    kept = [torch.ones_like(p) for _, p in run.policy.named_parameters()]
    for (_, parameter), gradient in zip(run.policy.named_parameters(), kept, strict=True):
        parameter.grad = gradient
    gram_of(run, batch)
    assert all(p.grad is g and bool((g == 1).all())
               for (_, p), g in zip(run.policy.named_parameters(), kept, strict=True))  # fmt: skip


def test_the_four_passes_go_through_gradient_checkpointing(llama):
    grams = []
    for checkpointing in (False, True):
        run = parts(llama, **QUANTIZED_ROLLOUT)
        batch = mostly_live(run)
        run.policy.set_gradient_checkpointing(checkpointing)
        grams.append(gram_of(run, batch))
    assert torch.equal(*grams)


def test_an_aligned_learner_has_one_gradient(llama):
    run = parts(llama)
    gram = gram_of(run, mostly_live(run))
    assert float(gram[0, 0]) > 0.0 and torch.equal(gram, gram[0, 0].expand(4, 4))


def test_a_token_that_the_learner_cuts_gives_no_gradient_and_no_nan(llama):
    run = parts(llama, **QUANTIZED_ROLLOUT, rollout={"min_p": 0.3})
    batch = mostly_live(run)
    batch.responses = [[(token + 1) % 259 for token in response] for response in batch.responses]  # mostly outside
    probe = run.probe(*COSTLY)
    metrics = run.learn(batch, 0, probe)
    assert metrics["policy/outside_frac"] > 0.2 and all(math.isfinite(value) for value in metrics.values()), metrics
    assert all(math.isfinite(value) for value in probe.metrics.values()), probe.metrics
