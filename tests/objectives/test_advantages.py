import statistics

import pytest
import torch

from qarl.objectives.advantages import compute_advantages

KINDS = ["grpo", "grpo_no_std", "rloo", "reinforce"]
GROUPS = [7, 3, 7, 3, 3, 7, 3]  # interleaved, ids not from 0
REWARDS = [0.1, 1.0, 0.7, 0.25, 0.0, 0.4, 0.9]


def transcription(rewards: list[float], groups: list[int], kind: str, eps: float) -> list[float]:
    out = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        others = [r for j, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and j != i]
        out.append(
            {
                "grpo": (reward - statistics.mean(members)) / (statistics.stdev(members) + eps),
                "grpo_no_std": reward - statistics.mean(members),
                "rloo": reward - statistics.mean(others),
                "reinforce": (reward - statistics.mean(rewards)) / (statistics.stdev(rewards) + eps),
            }[kind]
        )
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_matches_the_formula(kind):
    got = compute_advantages(torch.tensor(REWARDS, dtype=torch.float64), torch.tensor(GROUPS), kind, eps=1e-3)
    expected = torch.tensor(transcription(REWARDS, GROUPS, kind, 1e-3), dtype=torch.float64)
    # float64 rounding of sums of at most 7 values below 1
    torch.testing.assert_close(got, expected, atol=1e-14, rtol=0)


@pytest.mark.parametrize("kind", ["grpo", "grpo_no_std", "rloo"])
def test_a_group_of_one_has_no_advantage(kind):
    assert compute_advantages(torch.tensor([5.0, 0.0, 1.0]), torch.tensor([0, 1, 1]), kind)[0].item() == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_equal_rewards_give_exactly_zero_although_their_mean_is_rounded(kind):
    assert (0.1 + 0.1 + 0.1) / 3 != 0.1
    got = compute_advantages(torch.full((3,), 0.1, dtype=torch.float64), torch.zeros(3, dtype=torch.int64), kind)
    assert torch.equal(got, torch.zeros(3).double())
    assert compute_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64), kind).shape == (0,)


def test_a_group_of_equal_rewards_is_zero_beside_one_that_differs():
    got = compute_advantages(torch.tensor([0.3, 0.3, 0.3, 0.0, 1.0]), torch.tensor([0, 0, 0, 1, 1]), "grpo")
    assert got[:3].tolist() == [0.0] * 3 and got[3] == -got[4] != 0.0 and got.dtype == torch.float32
