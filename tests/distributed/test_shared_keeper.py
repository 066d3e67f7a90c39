"""Checkpoints of several ranks: saved by all or not at all, and after a fault only if all ranks take part."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cut_tensors import cut_rows, some_tensors
from thread_ranks import as_threads

from qarl.config.checkpoint import CheckpointConfig
from qarl.distributed.ranks import OtherRankFailed, Ranks
from qarl.errors import UserError
from qarl.storage.checkpoint import CheckpointStore
from qarl.storage.history import read_history
from qarl.storage.saved_state import Inputs
from qarl.training.checkpoint_manager import CheckpointManager
from qarl.training.loss_scale import LossScale
from qarl.training.state import capture

NEWEST = "; the same command resumes from step 1"


class Place:
    """A checkpoint manager of a run without a model: step n has the tensors of `some_tensors(n)`."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self.ranks, self.said, self.step, self.digest, self.logged = ranks, [], 0, "ab" * 32, []
        updates = SimpleNamespace(begun=0, pieces=self.pieces, scale=LossScale(1.0))
        snapshot = SimpleNamespace(manifest=lambda: SimpleNamespace(digest=lambda: self.digest))
        self.run = SimpleNamespace(
            learner=SimpleNamespace(ranks=ranks, skipped_in_a_row=0),
            updates=updates,
            policy=SimpleNamespace(version=0, current=snapshot),
            source=None,
            stream=SimpleNamespace(state=lambda: {"position": self.step}),
            inputs=Inputs({}, {}),
            started=None,
        )
        console = SimpleNamespace(warn=self.said.append, message=self.said.append, phase=lambda name: nullcontext())
        directory = SimpleNamespace(path=folder, checkpoints=folder / "checkpoints")
        self.keeper = CheckpointManager(CheckpointConfig(), self.run, directory, console)
        self.recorder = SimpleNamespace(step=0, log=self.log)
        self.keeper.finish(0)

    def pieces(self) -> tuple[list[Any], dict[str, Any]]:
        tensors = some_tensors(self.step)
        return cut_rows(tensors, self.ranks.rank, self.ranks.count), {"tensors": sorted(tensors["optimizer"])}

    def log(self, step: int, metrics: dict[str, float]) -> None:
        assert self.ranks.first, "one rank records"
        self.logged.append(step)

    def learn(self) -> None:
        """Take a step, without its metrics."""
        self.step += 1
        self.run.updates.begun += 1
        self.keeper.learned(self.step, {})

    def take(self) -> None:
        self.learn()
        self.keeper.finish(self.step)

    def rescue(self, fault: BaseException | None, together: bool = True) -> None:
        """Handle a fault as a run's loop does. together: All ranks learn of it."""
        try:
            if together:
                self.ranks.all_agree(fault)
            elif fault is not None:
                raise fault
        except BaseException as error:
            self.keeper.rescue(self.recorder, error)


def of_ranks(folder: Path, work: Any, count: int = 3) -> list[Place]:
    def run(ranks: Ranks) -> Place:
        place = Place(ranks, folder)
        place.take()
        place.keeper.save()
        work(place)
        return place

    places = as_threads(count, run)
    assert all(isinstance(place, Place) for place in places), places
    return places


def saved(folder: Path) -> list[int]:
    return CheckpointStore(folder / "checkpoints", 0).steps()


def test_a_step_is_saved_by_all_and_recorded_by_the_first(tmp_path):
    of_ranks(tmp_path, lambda place: None)
    found = CheckpointStore(tmp_path / "checkpoints", 0).latest_valid(pytest.fail)
    assert (found.step, found.ranks, found.state["data"]) == (1, 3, {"position": 1})
    assert read_history(tmp_path).checkpoint == 1


def half_way(place: Place) -> None:
    """The next step has changed the weights of one rank."""
    place.take()
    place.run.updates.begun += place.ranks.rank == 1


def unwritable(place: Place) -> None:
    """The metrics of the step cannot be written."""

    def refuse(step: int, metrics: dict[str, float]) -> None:
        raise UserError("metrics.jsonl: input/output error")

    place.learn()
    place.recorder.log = refuse


CHANGED = f"step 2 is not saved (the interrupted step had already changed the weights){NEWEST}"
SAVED = "step {} is saved; the same command resumes from there"


@pytest.mark.parametrize(
    ("prepare", "fault", "steps", "line"),
    [
        (Place.take, ValueError("odd"), [1, 2], SAVED.format(2)),
        (Place.learn, ValueError("odd"), [1, 2], SAVED.format(2)),  # its metrics are written first
        (half_way, ValueError("odd"), [1], CHANGED),
        (unwritable, ValueError("odd"), [1], SAVED.format(1)),
    ],
)
def test_a_fault_that_all_ranks_raise_saves_the_last_finished_step(tmp_path, prepare, fault, steps, line):
    def work(place: Place) -> None:
        prepare(place)
        place.rescue(fault if place.ranks.rank == 1 else None)

    places = of_ranks(tmp_path, work)
    assert saved(tmp_path) == steps and all(place.said == [line] for place in places)
    assert [place.logged for place in places] == [[2] if prepare is Place.learn else [], [], []]


def test_a_fault_of_one_rank_alone_leaves_the_newest_checkpoint(tmp_path):
    def work(place: Place) -> None:
        place.take()
        if place.ranks.rank == 1:  # the others are in a collective that never ends
            place.rescue(ValueError("odd"), together=False)

    first, alone, _ = of_ranks(tmp_path, work)
    assert saved(tmp_path) == [1] and first.said == []
    why = "saving needs all ranks, and one rank failed alone"
    assert alone.said == [f"step 2 is not saved ({why}){NEWEST}"]


def test_ranks_that_hold_other_codes_save_nothing(tmp_path):
    def work(place: Place) -> None:
        place.digest = "cd" * 32 if place.ranks.rank == 2 else place.digest
        kind, match = (RuntimeError, "holds other codes than rank 0")
        with pytest.raises(kind if place.ranks.rank == 2 else OtherRankFailed, match=match):
            capture(place.run, {})

    of_ranks(tmp_path, work)
