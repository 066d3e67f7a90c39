"""The dynamic loss scale follows torch's GradScaler, survives a checkpoint, and is named when a run gives up."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_runs import live, parts

from qarl.errors import UserError
from qarl.training import loss_scale
from qarl.training.loss_scale import LossScale

QUANT = {"scheme": "w8a8", "group_size": None, "learner": "full_precision"}
FLOAT16 = {"quant": QUANT, "model": {"learner_dtype": "float16"}}


@settings(max_examples=50, deadline=None, derandomize=True)
@given(finite=st.lists(st.booleans(), max_size=60), interval=st.integers(1, 5))
def test_the_scale_is_that_of_grad_scaler_after_any_series_of_overflows(finite, interval):
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=interval)
    ours = LossScale(1024.0, dynamic=True)
    theirs.scale(torch.ones(1))  # it is made lazily
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_scale, "GROWTH_INTERVAL", interval)
        for good in finite:
            weight.grad = torch.ones(1) if good else torch.full((1,), math.inf)
            theirs.step(optimizer)
            theirs.update()
            ours.update(good)
            assert ours.value == theirs.get_scale()


def test_a_fixed_scale_stays_and_is_not_replaced_by_a_checkpoint():
    fixed, dynamic = LossScale(8.0), LossScale(65536.0, dynamic=True)
    fixed.update(False)
    dynamic.update(False)
    fixed.load(dynamic.state())
    assert fixed.value == 8.0 and dynamic.value == 32768.0
    again = LossScale(65536.0, dynamic=True)
    again.load(fixed.state())
    again.load(None)
    assert again.value == 65536.0
    again.load(dynamic.state())
    assert again == dynamic


def test_a_first_scale_that_is_too_large_is_searched_down_without_ending_the_run(llama, monkeypatch):
    monkeypatch.setattr("qarl.config.config.DYNAMIC_LOSS_SCALE", 2.0**40)
    run = parts(llama, **FLOAT16, train={"max_skipped_steps": 0})
    masters = run.masters()
    metrics = run.learn(live(run))
    assert metrics["policy/skipped_steps"] == 2.0 and metrics["optim/loss_scale"] == 2.0**38
    assert all(torch.equal(masters[name], master) for name, master in run.masters().items())
    assert run.learner.skipped_in_a_row == 0


def test_a_run_that_overflows_again_and_again_names_the_loss_scale(llama):
    run = parts(llama, **FLOAT16, optim={"loss_scale": 1e30}, train={"max_skipped_steps": 1})
    with pytest.raises(UserError, match=r"not finite in 2 optimizer steps in a row .*optim\.loss_scale \(1e\+30\)"):
        run.learn(live(run))
    run = parts(llama, **FLOAT16, train={"max_skipped_steps": 1})
    scale = run.learner.updates.scale
    scale.settled, scale.value = True, 2.0**60
    with pytest.raises(UserError, match=r"optim\.loss_scale \(5\.76461e\+17 now\)"):
        run.learn(live(run))
