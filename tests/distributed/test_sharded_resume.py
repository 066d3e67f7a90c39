"""Checkpoints of several ranks: another number of ranks resumes with the same bits; ranks die or fail while saving."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cut_tensors import cut_rows, some_tensors
from ranks import run_ranks
from row_runs import CPU, Case, exchange_of, loss_of, offloading
from thread_ranks import ThreadRanks, as_threads
from torch import Tensor
from whole_pieces import whole_pieces

from qarl.config import Config
from qarl.distributed.exchange import SingleProcessExchange
from qarl.distributed.ranks import Ranks, SingleProcess
from qarl.policy.load import load_model
from qarl.policy.policy import Policy
from qarl.storage.checkpoint import CheckpointStore
from qarl.storage.loading import load_checkpoint
from qarl.training.row_setup import build_rows
from qarl.training.setup import build_policy
from qarl.training.updates import LocalUpdates, Updates

HERE = __file__
W4A16 = {"scheme": "w4a16", "group_size": 32}
CASES = {
    "adamw": {},
    "adamw on the host": {"optim": {"offload": "all"}},
    "muon, asymmetric": {"optim": {"name": "muon", "lr": 1e-3}, "quant": {**W4A16, "symmetric": False}},
}


class ThreadExchange(SingleProcessExchange):
    """The collectives that loading a checkpoint needs."""

    def __init__(self, ranks: Ranks) -> None:
        self.rank, self.count, self._ranks = ranks.rank, ranks.count, ranks

    def begin_gathers(self, own: Sequence[Tensor], cuts: Sequence[Sequence[range]], outs: Sequence[Tensor]):
        for rows, cut, out in zip(own, cuts, outs, strict=True):
            for place, part in zip(cut, self._ranks.gather_tensors(rows), strict=True):
                super().begin_gathers([part], [[place]], [out])
        return lambda: None

    def largest(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._ranks.gather_tensors(tensor)).amax(0)


def held_by(ranks: Ranks, config: Config) -> tuple[Policy, Updates]:
    """A policy and its optimizer engine, as in a run."""
    if ranks.count == 1:
        policy = build_policy(config, load_model(config.model), CPU)
        return policy, LocalUpdates(policy, config)
    exchange = ThreadExchange(ranks) if isinstance(ranks, ThreadRanks) else exchange_of(ranks)
    return build_rows(config, CPU, None, exchange, ranks)


def save(ranks: Ranks, policy: Policy, updates: Updates, folder: Path) -> dict[str, Any]:
    pieces, meta = updates.pieces()
    digest = policy.current.manifest().digest()
    state = {"version": policy.version, "optimizer": meta, "snapshot_sha256": digest}
    CheckpointStore(folder, 0, ranks).save(2, pieces, state)
    return state


def resume(ranks: Ranks, model: str, sections: dict[str, Any], source: str, folder: str) -> dict[str, Any]:
    """Load a checkpoint into the masters of these ranks, after two that do not fit, and save it without a step."""
    policy, updates = held_by(ranks, Case(model, sections).config)
    found = load_checkpoint(Path(source) / "latest", ranks=ranks)
    meta = found.state["optimizer"]
    for wrong in ({"optimizer": "sgd"}, {"tensors": [*meta["tensors"], "x/exp_avg"]}):
        with pytest.raises(ValueError, match="optimizer state"):
            updates.load(found.read, meta | wrong, 2)
        assert policy.version == 0
    updates.load(found.read, meta, found.state["version"])
    return save(ranks, policy, updates, Path(folder))


def assert_same(folder: Path, other: Path) -> None:
    first, second = (load_checkpoint(path / "latest") for path in (folder, other))
    assert first.state == second.state
    for group in ("masters", "optimizer"):
        assert first.tensors[group].keys() == second.tensors[group].keys()
        for name, tensor in first.tensors[group].items():
            assert torch.equal(tensor, second.tensors[group][name]), name


def train(model: str, sections: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Two optimizer steps of one process, and a checkpoint of them."""
    policy, updates = held_by(SingleProcess(), Case(model, sections).config)
    updates.set_lr(1.0)
    for part in ([0], [1, 2]):
        updates.clear()
        updates.backward(loss_of(policy, part))
        updates.step(updates.norm())
    return save(SingleProcess(), policy, updates, folder)


@pytest.fixture(autouse=True)
def _offloading():
    with offloading():
        yield


@pytest.mark.parametrize("sections", CASES.values(), ids=CASES.keys())
def test_any_number_of_ranks_resumes_with_the_same_bits(tiny_model, tmp_path, sections):
    common = {"model": str(tiny_model("llama")), "sections": sections}
    state = train(**common, folder=tmp_path / "0")
    assert {name.rpartition("/")[2] for name in state["optimizer"]["tensors"]} >= {"step", "exp_avg"}
    for number, count in enumerate((2, 3, 2, 1), start=1):
        places = {"source": str(tmp_path / str(number - 1)), "folder": str(tmp_path / str(number))}
        assert as_threads(count, lambda ranks: resume(ranks, **common, **places)) == [state] * count  # noqa: B023
        assert load_checkpoint(tmp_path / str(number) / "latest").ranks == count
        assert_same(tmp_path / "0", tmp_path / str(number))
    for again, before in ((3, 1), (4, 0)):  # the same number of ranks writes the same bytes
        for path in (tmp_path / str(before) / "000002").iterdir():
            assert path.read_bytes() == (tmp_path / str(again) / "000002" / path.name).read_bytes(), path.name


def test_real_ranks_resume_from_one_process_and_back(tiny_model, tmp_path):
    common = {"model": str(tiny_model("llama")), "sections": {}}
    state = train(**common, folder=tmp_path / "0")
    places = {"source": str(tmp_path / "0"), "folder": str(tmp_path / "1")}
    assert run_ranks(2, f"{HERE}:resume", {**common, **places}) == [state] * 2
    assert load_checkpoint(tmp_path / "1" / "latest").ranks == 2
    assert_same(tmp_path / "0", tmp_path / "1")
    assert resume(SingleProcess(), **common, source=str(tmp_path / "1"), folder=str(tmp_path / "2")) == state
    assert_same(tmp_path / "0", tmp_path / "2")


# --- a rank that dies while all of them save


def saves(ranks: Ranks, folder: str, victim: int, at: int) -> None:
    """Save step 2; rank `victim` kills itself in its fsync number `at`."""
    if ranks.rank == victim:
        real, count = os.fsync, 0

        def fsync(fd: int) -> None:
            nonlocal count
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
            real(fd)

        os.fsync = fsync
    pieces = cut_rows(some_tensors(2), ranks.rank, ranks.count)
    CheckpointStore(Path(folder), 1, ranks).save(2, pieces, {"step": 2})


# The first rank syncs two files, their directory, state.json, manifest.json, the directory again; then the rename.
@pytest.mark.parametrize("victim, at, stands", [(1, 1, 1), (0, 5, 1), (0, 7, 2)])
def test_a_rank_killed_in_a_save_leaves_a_whole_checkpoint(tmp_path, victim, at, stands):
    folder = tmp_path / "checkpoints"
    CheckpointStore(folder, 1).save(1, whole_pieces(some_tensors(1)), {"step": 1})
    codes = [1, 1]
    codes[victim] = -signal.SIGKILL
    with pytest.raises(AssertionError, match="exit codes") as caught:
        run_ranks(2, f"{HERE}:saves", {"folder": str(folder), "victim": victim, "at": at}, timeout_s=4)
    assert f"exit codes {codes}" in str(caught.value) and "OtherRankFailed: rank" in str(caught.value), caught.value
    store = CheckpointStore(folder, 1)
    found = store.latest_valid(pytest.fail)
    assert found.state == {"step": stands}
    for group, members in some_tensors(stands).items():
        for name, tensor in members.items():
            assert torch.equal(found.tensors[group][name], tensor)
    assert [path.name for path in folder.iterdir() if path.name.startswith(".tmp")] == []


# --- a disk that refuses one of them half-way through a file
