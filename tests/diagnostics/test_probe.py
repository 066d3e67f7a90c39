"""The probe: its numbers against independent ones, and that it leaves no trace in the run."""

import math

import pytest
import torch
from tiny_runs import parts
from watched import QUANTIZED_ROLLOUT, mostly_live, packed, shadow

from qarl.config import diagnostics

pytestmark = pytest.mark.usefixtures("one_thread")
SHADOW_RATIO = {**QUANTIZED_ROLLOUT, "objective": {"name": "gspo", "ratio": "shadow"}, "train": {"epochs": 2}}
REPLAYED = {"rollout": {"top_p": 0.6}, "objective": {"name": "grpo", "truncation_set": "replay"}}
COSTLY = tuple(name for name in diagnostics.COSTLY if name != "backward")  # which is for a GPU, see test_backward


@pytest.mark.parametrize("scheme, group", [("bf16", None), ("w8a8", None), ("w4a16", 32), ("fp8", None), ("w4a8", 32)])
def test_the_shadow_of_the_snapshot_is_what_the_native_sampler_reported_bit_for_bit(llama, scheme, group):
    quant = {"scheme": scheme, "group_size": group, "learner": "full_precision"}
    run = parts(llama, quant=quant, model={"learner_dtype": "float32"})
    batch = mostly_live(run)
    assert torch.equal(shadow(run, batch), packed(batch.logp_sampler))
    learner, _ = run.policy.logprobs(batch.prompts, batch.responses, run.sampling.truncation, 128)
    assert not torch.equal(learner.detach(), packed(batch.logp_sampler))


@pytest.mark.parametrize("sections", [{}, SHADOW_RATIO], ids=["aligned", "shadow_ratio"])
def test_a_probe_changes_no_bit_of_the_run(llama, sections):
    found = []
    for due in ((), COSTLY):
        run, metrics = parts(llama, **sections), []
        for step in range(2):
            metrics.append(run.learn(mostly_live(run, step), step, run.probe(*due) if due else None))
        found.append((metrics, run.policy.current.manifest(), run.masters() | run.optimizer.state_tensors()[0]))
    (*plain, tensors), (*probed, probed_tensors) = found
    assert plain == probed and all(torch.equal(tensors[name], probed_tensors[name]) for name in tensors)


def test_the_kl_from_the_initial_policy_is_zero_until_the_first_update(llama):
    run, found = parts(llama, optim={"lr": 1e-2}), []
    for step in range(2):
        batch, probe = mostly_live(run), run.probe("reference")
        how = batch.prompts, batch.responses, run.sampling.truncation, 128
        start = run.policy.frozen_logprobs(run.policy.reference, *how).double()
        run.learn(batch, step, probe)
        apart = start - packed(batch.logp_old).double()
        found.append((probe.metrics["policy/kl_ref"], float((apart.exp() - 1 - apart).mean())))
    assert found[0] == (0.0, 0.0) and found[1][0] == pytest.approx(found[1][1], rel=1e-9) and found[1][0] > 1e-4


@pytest.mark.parametrize("sections", [{}, REPLAYED], ids=["own sets", "replayed sets"])
def test_precision_is_split_at_every_training_forward(llama, sections):
    run = parts(llama, **QUANTIZED_ROLLOUT, optim={"lr": 1e-2}, **sections)
    batch, probe = mostly_live(run), run.probe("shadow")
    at_start = shadow(run, batch)
    run.learn(batch, 0, probe)
    tokens = probe.tokens(batch)
    # The first minibatch ran at the snapshot, where the shadow is the sampler; the second one step later.
    first = [i in probe._seen[0].minibatch.indices for i in range(len(batch))]
    alpha = (tokens.logp_shadow - tokens.logp_sampler).split([len(r) for r in batch.responses])
    assert all(float(a.abs().max()) == 0.0 for a, early in zip(alpha, first, strict=True) if early)
    assert any(float(a.abs().max()) > 0.0 for a, early in zip(alpha, first, strict=True) if not early)
    assert torch.equal(at_start, tokens.logp_sampler)
    beta = (tokens.logp - tokens.logp_shadow).double().abs()
    beta = beta[beta.isfinite()]
    assert probe.metrics["precision/beta_abs_mean"] == pytest.approx(float(beta.mean()), rel=1e-6)
    assert probe.metrics["precision/beta_abs_max"] == pytest.approx(float(beta.max()), rel=1e-6)
    assert torch.equal(tokens.logp, packed(batch.logp)) and tokens.band.high == 1.2 and tokens.weights is None
    assert torch.equal(tokens.log_ratio, (tokens.logp - tokens.logp_old).nan_to_num())


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
    for learner, sections in (("aligned", {}), ("full_precision", {}), ("full_precision", REPLAYED)):
        run = parts(llama, quant={"learner": learner}, optim={"lr": 1e-2}, train={"micro_batch_tokens": 30}, **sections)
        batch, probe = mostly_live(run), run.probe("deployed")
        before = shadow(run, batch)
        run.learn(batch, 0, probe)
        moved = (shadow(run, batch) - before).double()
        signs = batch.advantages.sign().repeat_interleave(torch.tensor([len(r) for r in batch.responses]))
        inside = moved.isfinite()
        improvement = float((signs * moved)[inside].mean())
        assert probe.metrics["deployed/improvement"] == pytest.approx(improvement, rel=1e-9)
        assert probe.metrics["deployed/improvement_per_update"] == pytest.approx(improvement / run.policy.version)
        assert probe.metrics["deployed/delta_abs_mean"] == pytest.approx(float(moved[inside].abs().mean()), rel=1e-9)


def test_ends_of_responses_are_counted(llama):
    run = parts(llama, **QUANTIZED_ROLLOUT)
    batch, probe = mostly_live(run), run.probe("shadow")
    for response in batch.responses[:3]:
        response[-1] = min(run.sampling.stop_token_ids)
    run.learn(batch, 0, probe)
    ends = [token in run.sampling.stop_token_ids for response in batch.responses for token in response]
    assert sum(ends) >= 3 and probe.metrics["precision/eos_frac"] == pytest.approx(sum(ends) / len(ends))


def test_a_token_that_the_learner_cuts_gives_no_gradient_and_no_nan(llama):
    run = parts(llama, **QUANTIZED_ROLLOUT, rollout={"min_p": 0.3})
    batch = mostly_live(run)
    batch.responses = [[(token + 1) % 259 for token in response] for response in batch.responses]  # mostly outside
    probe = run.probe(*COSTLY)
    metrics = run.learn(batch, 0, probe)
    assert metrics["policy/outside_frac"] > 0.2 and all(math.isfinite(value) for value in metrics.values()), metrics
    assert all(math.isfinite(value) for value in probe.metrics.values()), probe.metrics
