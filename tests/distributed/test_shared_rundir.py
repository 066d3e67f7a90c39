"""The run directory of several ranks: one locks it, all must see it, and its history has their number."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from thread_ranks import as_threads
from tiny_runs import settings

from qarl.config import Config
from qarl.distributed.ranks import OtherRankFailed, Ranks
from qarl.errors import UserError
from qarl.storage import rundir as module
from qarl.storage.history import History, RanksFrom, ranks_after, read_history, write_history
from qarl.storage.rundir import RunDirectory


def config(path: Path) -> Config:
    return Config.model_validate(settings(Path("some/model"), train={"steps": 4, "run_dir": str(path)}))


def test_the_first_rank_locks_the_directory_and_all_read_its_history(tmp_path):
    path = tmp_path / "runs" / "name"

    def work(ranks: Ranks) -> tuple[Any, ...]:
        with RunDirectory.open(config(path), "auto", ranks) as directory:
            if not ranks.first:
                with pytest.raises(UserError, match="in use by process"):
                    RunDirectory.open(config(path), "auto")
            ranks.barrier()
            history = directory.history_at(0, own=False)
            assert directory.begin({}, history) == [] and directory.checkpoints == path / "checkpoints"
            return sorted(entry.name for entry in path.iterdir()), history

    found = as_threads(3, work)
    assert all(result == found[0] for result in found), found
    assert found[0][0] == [".lock", "config.yaml", "environment.json", "history.json"]
    assert json.loads((path / "history.json").read_text())["ranks"] == [{"after": 0, "count": 3}]
    RunDirectory.open(config(path), "auto").close()  # the lock is free again


def test_a_rank_that_does_not_see_the_directory_fails_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.2)

    def work(ranks: Ranks) -> RunDirectory:
        return RunDirectory.open(config(tmp_path / ("here" if ranks.rank != 1 else "there")), "auto", ranks)

    first, blind, third = as_threads(3, work)
    assert type(blind) is UserError and "\n" not in str(blind)
    assert "there: on " in str(blind) and " this is not the directory that rank 0 writes to on " in str(blind)
    assert "set train.run_dir to one on a disk that all nodes share" in str(blind)
    for other in (first, third):
        assert isinstance(other, OtherRankFailed) and str(other) == f"rank 1 on {socket.gethostname()}: {blind}"
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_the_first_rank_cannot_use_fails_on_all(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    first, second = as_threads(2, lambda ranks: RunDirectory.open(config(tmp_path), "auto", ranks))
    assert type(first) is UserError and "not a run directory" in str(first)
    assert isinstance(second, OtherRankFailed) and "not a run directory" in str(second)


def test_the_history_says_where_the_number_of_ranks_changed(tmp_path):
    history = History()
    for start, count, expected in (
        (0, 1, []),
        (0, 2, [(0, 2)]),
        (4, 2, [(0, 2)]),
        (6, 1, [(0, 2), (6, 1)]),
        (8, 3, [(0, 2), (6, 1), (8, 3)]),
        (6, 2, [(0, 2)]),  # back to an earlier checkpoint: what came after it is forgotten
    ):
        history = History(ranks=ranks_after(history, start, count))
        assert history.ranks == [RanksFrom(after=after, count=number) for after, number in expected]
        write_history(tmp_path, history)
        assert read_history(tmp_path) == history
    write_history(tmp_path, History(checkpoint=2))
    assert (tmp_path / "history.json").read_text() == '{"began_after": 0, "checkpoint": 2}\n'
