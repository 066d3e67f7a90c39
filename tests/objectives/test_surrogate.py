import pytest
import torch

from qarl.objectives.common import add_stats, finish_stats, stat, weight_stats


def test_stat_counts_only_what_is_under_the_mask():
    assert stat(torch.tensor([1.0, 5.0, 3.0]), torch.tensor([True, False, True])).tolist() == [4.0, 2.0]


def test_a_nan_outside_the_mask_does_not_enter():
    assert stat(torch.tensor([1.0, float("nan")]), torch.tensor([True, False])).tolist() == [1.0, 1.0]


def test_adding_keeps_names_that_only_one_side_has():
    total = add_stats({"a": stat(torch.tensor([1.0]))}, {"b": stat(torch.tensor([3.0, 5.0]))})
    assert finish_stats(total) == {"a": 1.0, "b": 4.0}


def test_nothing_counted_is_zero():
    assert finish_stats({"a": stat(torch.zeros(0))}) == {"a": 0.0}


def test_ess_is_that_of_all_parts_together():
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.0, 4.0])]
    metrics = finish_stats(add_stats(weight_stats(parts[0]), weight_stats(parts[1])))
    weights = torch.cat(parts).tolist()
    assert metrics["correction/ess"] == pytest.approx(sum(weights) ** 2 / (5 * sum(w * w for w in weights)))
    assert set(metrics) == {"correction/weight_mean", "correction/ess"}


def test_ess_of_equal_weights_is_one():
    assert finish_stats(weight_stats(torch.full((7,), 1.5)))["correction/ess"] == 1.0


def test_ess_of_all_zero_weights_is_zero():
    assert finish_stats(weight_stats(torch.zeros(3)))["correction/ess"] == 0.0
