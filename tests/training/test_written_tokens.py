"""Tokens that the policy did not write (tool outputs): in the forward, and in no loss, ratio, statistic or sum."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from qarl_kernels.logprob import Truncation
from safetensors.torch import save_file
from tiny_runs import Parts, parts

from qarl.batch.batch import Batch, build_batch
from qarl.batch.saved import read_rollouts, rollout_tensors
from qarl.errors import UserError
from qarl.objectives.segments import Segments, Totals
from qarl.training.metrics import token_metrics
from qarl.types import Prompt, Rollout

pytestmark = pytest.mark.usefixtures("one_thread")
TRAIN = {"prompts_per_step": 2, "micro_batch_tokens": 40}
OPTIONS = {"train": TRAIN, "optim": {"name": "adamw", "lr": 1e-3}, "objective": {"name": "grpo"}}


def written_of(length: int, sample: int) -> list[bool] | None:
    """Mark the tokens that the policy wrote: all except some in the middle, the first, or the last; None: all."""
    cut = {0: slice(2, 5), 1: slice(0, 1), 2: slice(length - 1, length)}.get(sample % 4)
    if cut is None:
        return None
    flags = [True] * length
    flags[cut] = [False] * len(flags[cut])
    return flags


def sampled(run: Parts, spoil: float | None) -> tuple[list[Prompt], list[Rollout]]:
    """Sample rollouts with such marks. spoil: Log-prob to set at tokens that the policy did not write."""
    prompts = [Prompt(i, [5 + i, 70, 90 + i], f"prompt {i}", {}) for i in range(run.config.train.prompts_per_step)]
    run.engine.publish(run.policy.current)
    marked = []
    for index, rollout in enumerate(run.engine.generate(prompts, run.sampling, run.policy.version)):
        flags = written_of(len(rollout.token_ids), index)
        values = rollout.logprobs
        if flags is not None and spoil is not None:
            values = [value if own else spoil for value, own in zip(values, flags, strict=True)]
        marked.append(replace(rollout, written=flags, logprobs=values))
    return prompts, marked


def marked_batch(run: Parts, spoil: float | None = None) -> Batch:
    prompts, rollouts = sampled(run, spoil)
    batch = build_batch(prompts, rollouts, [0.0] * len(rollouts), "grpo", run.policy.version)
    batch.advantages = torch.linspace(-1.0, 1.6, len(batch))
    return batch


def test_the_gradient_is_that_of_the_tokens_that_the_policy_wrote(llama) -> None:
    """Against a forward that gives every token a log-prob, of which those of the policy are picked by hand."""
    run = parts(llama, **OPTIONS)
    batch = marked_batch(run, spoil=float("nan"))
    kept = [flags or [True] * len(tokens) for flags, tokens in zip(batch.written, batch.responses, strict=True)]
    own = torch.tensor(list(chain.from_iterable(kept)))
    assert int((~own).sum()) > 0 and batch.whole().tokens == int(own.sum()) == len(batch.whole().logp_sampler)

    plain, _ = run.policy.logprobs(batch.prompts, batch.responses, Truncation(), 64)
    segments = Segments.from_lengths([sum(flags) for flags in kept])
    logp = plain[own]
    value = (logp - logp.detach()).exp() * segments.expand(batch.advantages)
    masters = [parameter for _, parameter in run.policy.named_parameters()]
    expected = torch.autograd.grad(
        -sum(part.mean() for part in value.split(segments.lengths.tolist())) / len(batch), masters
    )

    learner = run.learner
    learner.begin(0, batch)
    plan = learner.plan(batch.whole(), _Quiet())
    assert plan.totals == Totals(len(batch), int(own.sum()), run.config.rollout.max_response_length)
    for part in learner.micro_batches(batch.whole()):
        logps = learner.token_logprobs(part, plan)
        loss, stats = learner.objective(logps, part.advantages, part.segments, plan.totals)
        assert int(stats["policy/clip_frac"][1]) == part.tokens == sum(part.lengths)
        loss.backward()
    for parameter, gradient in zip(masters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-7)
    assert torch.equal(batch.logp_old.read(batch.whole()), plain.detach()[own])


def test_what_stands_for_their_log_probs_is_never_read(llama) -> None:
    found = []
    for spoil in (None, float("nan"), 1e30):
        run = parts(llama, diagnostics={"shadow_every": 1, "gradients_every": 1}, **OPTIONS)
        batch = marked_batch(run, spoil)
        watch = run.probe("shadow", "gradients", "deployed")
        metrics = run.learn(batch, watch=watch)
        found.append((metrics, watch.metrics, token_metrics(batch), run.policy.current.manifest().digest()))
    assert found[0] == found[1] == found[2]
    assert found[0][2]["mismatch/delta_abs_max"] == 0.0


def test_saved_rollouts_come_back_with_their_marks(llama, tmp_path) -> None:
    run = parts(llama, **OPTIONS)
    batch = marked_batch(run)
    run.learn(batch)
    (tmp_path / "rollouts").mkdir()
    tensors = rollout_tensors(batch, [0.0] * len(batch))
    path = tmp_path / "rollouts" / "000001.safetensors"
    save_file(tensors, path)
    saved = read_rollouts(tmp_path, 1)
    assert saved.written == batch.written and saved.own_tokens == batch.own_tokens
    assert torch.equal(saved.logp_old, batch.logp_old.read(batch.whole()))
    for spoiled in (tensors["written"][1:], tensors["written"].float()):
        save_file(tensors | {"written": spoiled}, path)
        with pytest.raises(UserError, match=r"written is .*, expected uint8 \[\d+\]; give another --step"):
            read_rollouts(tmp_path, 1)


class _Quiet:
    def progress(self, responses: int) -> None:
        """Nothing is shown."""
