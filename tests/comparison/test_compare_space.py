"""The warning if the disk cannot hold the checkpoints of a comparison."""

from pathlib import Path

import pytest
from comparisons import settings_of, write_model

from qarl.checks.check import check_model
from qarl.comparison import space
from qarl.comparison.plan import Member
from qarl.comparison.space import space_warning
from qarl.config import Config
from qarl.memory.tensors import saved_bytes


@pytest.fixture
def member(tmp_path):
    """member(state, checkpoint={...}, steps=9): of a model of which one checkpoint is `member.bytes`."""
    model = write_model(tmp_path / "model")

    def make(state: str = "waiting", steps: int = 9, **checkpoint) -> Member:
        config = Config.model_validate(settings_of(model, checkpoint=checkpoint, train={"steps": steps}))
        make.bytes = saved_bytes(config, check_model(config.model).architecture)
        return Member("a", "w4a16", "aligned", 0, tmp_path / "runs/a", config, state)

    return make


@pytest.mark.parametrize(
    ("checkpoint", "kept"),
    [
        ({"every": 3, "keep_last": 2}, 2),
        ({"every": 3, "keep_last": 0}, 3),
        ({"every": 4, "keep_last": 0, "save_final": False}, 2),
        ({"every": 50, "save_final": False}, 0),
    ],
)
def test_the_warning_counts_kept_checkpoints_and_one_being_written_per_job(member, monkeypatch, checkpoint, kept):
    members = [member(**checkpoint) for _ in range(5)] + [member("finished"), member("failed")]
    needed = member.bytes * (5 * kept + 2)
    monkeypatch.setattr(space, "free_bytes", lambda path: needed)
    assert space_warning(members, Path("out"), jobs=2) is None
    monkeypatch.setattr(space, "free_bytes", lambda path: needed - 1)
    line = space_warning(members, Path("out"), jobs=2)
    assert line is not None and line.startswith("warning: out: 5 members will leave checkpoints of about ")
    assert "free some space" in line and "\n" not in line


def test_nothing_to_train_needs_nothing(member, monkeypatch):
    monkeypatch.setattr(space, "free_bytes", lambda path: 0)
    assert space_warning([member("finished"), Member("b", "bf16", "aligned", 0, Path("b"))], Path("out"), 3) is None
