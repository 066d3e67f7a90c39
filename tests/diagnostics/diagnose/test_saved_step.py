"""Rollouts as tensors: what is read, and what a user is told where something is missing or damaged."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qarl.batch.saved import pick_step, read_rollouts
from qarl.errors import UserError


def tensors() -> dict[str, torch.Tensor]:
    integers = {
        "prompt_lengths": [2, 2, 1],
        "response_lengths": [3, 1, 2],
        "prompt_tokens": [1, 2, 1, 2, 9],
        "response_tokens": [10, 11, 12, 20, 30, 31],
        "groups": [0, 0, 1],
    }
    found = {name: torch.tensor(values, dtype=torch.int32) for name, values in integers.items()}
    for i, name in enumerate(("logp_sampler", "logp_old", "logp")):
        found[name] = -torch.arange(6.0) - i
    found |= {"advantages": torch.tensor([1.0, -1.0, 0.0]), "rewards": torch.tensor([1.0, 0.0, 0.5])}
    return found | {"version": torch.tensor([4])}


def make_run(path: Path, drawn: list[int], saved: list[int]) -> Path:
    (path / "rollouts").mkdir(parents=True)
    for step in drawn:
        save_file(tensors(), path / "rollouts" / f"{step:06d}.safetensors")
    for step in saved:
        (path / "checkpoints" / f"{step:06d}").mkdir(parents=True)
    return path


def test_reads_what_was_written(tmp_path):
    step = read_rollouts(make_run(tmp_path, [3], []), 3)
    assert step.prompts == [[1, 2], [1, 2], [9]] and step.responses == [[10, 11, 12], [20], [30, 31]]
    assert (step.step, step.version, step.groups, len(step)) == (3, 4, [0, 0, 1], 3)
    assert torch.equal(step.logp_old, -torch.arange(6.0) - 1) and step.rewards.tolist() == [1.0, 0.0, 0.5]
    assert step.segments.lengths.tolist() == [3, 1, 2]


def test_the_step_is_the_last_with_both_or_the_one_asked_for(tmp_path):
    run = make_run(tmp_path, [2, 4, 6], [2, 4, 5])
    assert pick_step(run, None) == 4 and pick_step(run, 2) == 2


@pytest.mark.parametrize(
    ("drawn", "saved", "step", "words"),
    [
        ([], [2], None, "logging.rollout_tensors"),
        ([2], [], None, "checkpoint.every"),
        ([2, 4], [3], None, r"\(2, 4\) and a checkpoint \(3\)"),
        ([2, 4], [4], 2, r"no checkpoint of step 2; it has 4 \(checkpoint.every"),
    ],
)
def test_what_is_missing_is_named_with_the_key_that_makes_it(tmp_path, drawn, saved, step, words):
    with pytest.raises(UserError, match=words) as error:
        pick_step(make_run(tmp_path, drawn, saved), step)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("logp"), "no tensor 'logp'"),
        (lambda t: t.update(logp_old=torch.zeros(5)), r"logp_old has shape \[5\], not \[6\]"),
        (lambda t: t.update(advantages=torch.tensor([1.0, float("nan"), 0.0])), "advantages holds NaN"),
    ],
)
def test_a_file_of_another_layout_is_refused(tmp_path, change, words):
    values = tensors()
    change(values)
    (tmp_path / "rollouts").mkdir()
    save_file(values, tmp_path / "rollouts" / "000001.safetensors")
    with pytest.raises(UserError, match=words):
        read_rollouts(tmp_path, 1)


def test_a_torn_file_is_refused(tmp_path):
    path = make_run(tmp_path, [1], []) / "rollouts" / "000001.safetensors"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(UserError, match=r"000001.safetensors: not a readable safetensors file"):
        read_rollouts(tmp_path, 1)
