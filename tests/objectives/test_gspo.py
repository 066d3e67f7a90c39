import math

import pytest
import torch
from objective_sections import objective_config
from ragged import clip, geometric_mean, random_batch, surrogate_inputs

from qarl.objectives.common import finish_stats, log_ratio

LENGTHS = [4, 1, 0, 9, 3, 30, 2]
ADVANTAGES = [1.2, -0.7, 0.5, -1.1, 0.0, 0.9, 0.4]
GSPO = objective_config(name="gspo", clip_ratio_low=0.03, clip_ratio_high=0.05)


def surrogate(l: list[float], o: list[float], a: float) -> float:  # noqa: E741
    s = geometric_mean(l, o)
    return min(s * a, clip(s, 0.97, 1.05) * a)


def run(batch):
    ratio = log_ratio(batch.logp, batch.logp_old)
    return GSPO.surrogate(surrogate_inputs(ratio, batch.logp, batch.advantages, batch.segments))


def test_value_matches_the_formula():
    batch = random_batch(LENGTHS, ADVANTAGES, 0.2)
    expected = [surrogate(l, o, a) for l, o, _, a in batch.responses() for _ in l]  # noqa: E741
    torch.testing.assert_close(run(batch).value, torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=1e-13)


def test_gradient_matches_finite_differences_of_the_formula():
    batch = random_batch(LENGTHS, ADVANTAGES, 0.2)
    run(batch).value.sum().backward()
    step, expected = 1e-6, []
    for l, o, _, a in batch.responses():  # noqa: E741
        for i in range(len(l)):
            up, down = [*l], [*l]
            up[i] += step
            down[i] -= step
            expected.append((surrogate(up, o, a) - surrogate(down, o, a)) / (2 * step) * len(l))
    torch.testing.assert_close(batch.logp.grad, torch.tensor(expected, dtype=torch.float64), atol=1e-7, rtol=1e-6)


def test_clip_frac_counts_responses_on_the_side_their_advantage_pushes_to():
    batch = random_batch(LENGTHS, ADVANTAGES, 0.2)
    clipped = 0
    for l, o, _, a in batch.responses():  # noqa: E741
        s = geometric_mean(l, o)
        clipped += (a > 0 and s > 1.05) or (a < 0 and s < 0.97)
    assert 0 < clipped < 6
    assert finish_stats(run(batch).stats)["policy/clip_frac"] == pytest.approx(clipped / 6)  # one of the 7 is empty


def test_an_infinite_log_prob_gives_finite_values_and_gradients():
    batch = random_batch([3, 2], [1.0, -1.0], 0.01)
    batch.logp = batch.logp.detach().clone()
    batch.logp[0] = batch.logp[4] = -math.inf
    batch.logp.requires_grad_()
    result = run(batch)
    result.value.sum().backward()
    assert result.value.isfinite().all()
    assert batch.logp.grad.isfinite().all()
