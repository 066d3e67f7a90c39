"""Checkpoints in pieces: the same tensors for every cut and number of ranks; damage and full disks."""

import errno
import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cut_tensors import cut_anywhere, cut_rows, some_tensors
from fuzzing.damage import damage_entry, damage_file
from fuzzing.series import with_draws
from fuzzing.values import chance
from hypothesis.strategies import DrawFn
from thread_ranks import as_threads

from qarl.distributed.ranks import OtherRankFailed, Ranks
from qarl.errors import UserError
from qarl.storage import checkpoint as module
from qarl.storage import pieces as storage_pieces
from qarl.storage import tensorfile
from qarl.storage.checkpoint import CheckpointStore
from qarl.storage.loading import Checkpoint, CheckpointDamaged, load_checkpoint
from qarl.storage.manifest import encode
from qarl.storage.tensorfile import safetensors_chunks


def save(directory: Path, count: int, step: int, keep_last: int = 0, seed: int | None = None) -> list[Any]:
    """A checkpoint of `some_tensors(step)`, by rows, or with a seed cut anywhere."""

    def work(ranks: Ranks) -> Path:
        tensors = some_tensors(step)
        if seed is None:
            pieces = cut_rows(tensors, ranks.rank, count)
        else:
            pieces = cut_anywhere(tensors, ranks.rank, count, seed)
        return CheckpointStore(directory, keep_last, ranks).save(step, pieces, {"step": step})

    return as_threads(count, work)


def assert_is_step(found: Checkpoint, step: int) -> None:
    assert (found.step, found.state) == (step, {"step": step})
    for group, members in some_tensors(step).items():
        assert found.tensors[group].keys() == members.keys()
        for name, tensor in members.items():
            there = found.tensors[group][name]
            assert there.shape == tensor.shape and there.dtype == tensor.dtype and torch.equal(there, tensor), name


def listing(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_any_cut_is_read_back_whole_and_in_ranges(tmp_path, count, seed):
    paths = save(tmp_path, count, 3, seed=seed)
    assert paths == [tmp_path / "000003"] * count and os.readlink(tmp_path / "latest") == "000003"
    rng = random.Random(seed)
    for readers in (1, 2, 3):
        for found in as_threads(readers, lambda ranks: load_checkpoint(paths[0], ranks=ranks)):
            assert found.ranks == count
            assert_is_step(found, 3)
    for group, members in some_tensors(3).items():
        for name, tensor in members.items():
            start, stop = sorted(rng.randint(0, tensor.numel()) for _ in range(2))
            part = found.read(group, name, start, stop)
            assert part.shape == (stop - start,) and torch.equal(part, tensor.reshape(-1)[start:stop])


def test_one_rank_writes_whole_tensors_in_format_1(tmp_path):
    tensors = some_tensors(4)
    save(tmp_path, 1, 4)
    folder = tmp_path / "000004"
    assert listing(folder) == ["manifest.json", "masters.safetensors", "optimizer.safetensors", "state.json"]
    for group, members in tensors.items():
        assert (folder / f"{group}.safetensors").read_bytes() == b"".join(safetensors_chunks(members))
    manifest = json.loads((folder / "manifest.json").read_text())
    assert list(manifest) == ["format_version", "step", "groups", "files", "sha256"]
    assert (manifest["format_version"], manifest["step"]) == (1, 4)
    assert manifest["groups"] == {group: [f"{group}.safetensors"] for group in tensors}
    assert sorted(manifest["files"]) == ["masters.safetensors", "optimizer.safetensors", "state.json"]


SPLIT = {  # by the number of ranks
    1: ["masters-00001", "masters-00002", "masters-00003"],
    2: [f"masters-r000{rank}-of-0002{more}" for rank in (1, 2) for more in ("-00002", "")],
}


@pytest.mark.parametrize("count", SPLIT)
def test_files_are_named_by_rank_and_split_above_the_shard_size(tmp_path, monkeypatch, count):
    monkeypatch.setattr(storage_pieces, "SHARD_BYTES", 130 if count == 1 else 200)  # of 480, 84 + 44 and 4 bytes
    monkeypatch.setattr(tensorfile, "CHUNK_BYTES", 24)
    save(tmp_path, count, 1)
    assert_is_step(load_checkpoint(tmp_path / "latest"), 1)
    names = [name for name in listing(tmp_path / "000001") if name.startswith("masters")]
    assert names == [f"{name}.safetensors" for name in SPLIT[count]]


def test_two_formats_live_beside_each_other_and_are_pruned(tmp_path):
    for step, count in ((1, 2), (2, 1), (3, 3), (4, 2)):
        save(tmp_path, count, step, keep_last=2)
    assert listing(tmp_path) == ["000003", "000004", "latest"]
    assert_is_step(CheckpointStore(tmp_path, 2).latest_valid(pytest.fail), 4)
    found = as_threads(2, lambda ranks: CheckpointStore(tmp_path, 2, ranks).discard_after(3))
    assert found == [[4], [4]] and listing(tmp_path) == ["000003", "latest"]
    save(tmp_path, 2, 3)  # replaced by one of another number of ranks
    assert load_checkpoint(tmp_path / "latest").ranks == 2


# --- a disk that refuses


def refuse_on(monkeypatch: pytest.MonkeyPatch, word: str, code: int) -> None:
    """fsync of a file with `word` in its path fails."""
    real = os.fsync

    def fsync(fd: int) -> None:
        if word in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(code, os.strerror(code))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize(
    "file, culprit, code", [("optimizer-r0002", 1, errno.ENOSPC), ("manifest.json", 0, errno.ENOSPC)]
)
def test_a_refusing_disk_of_one_rank_leaves_only_the_previous_checkpoint(tmp_path, monkeypatch, code, file, culprit):
    save(tmp_path, 2, 1)
    with monkeypatch.context() as patch:
        refuse_on(patch, file, code)
        results = save(tmp_path, 2, 2, keep_last=1)
    fault, other = results[culprit], results[1 - culprit]
    assert type(fault) is UserError and "\n" not in str(fault)
    assert str(tmp_path / "000002") in str(fault) and os.strerror(code) in str(fault)
    named = f"rank {culprit} on {socket.gethostname()}: "
    assert isinstance(other, OtherRankFailed) and str(other) == f"{named}{fault}"
    assert listing(tmp_path) == ["000001", "latest"]
    assert save(tmp_path, 2, 2, keep_last=1) == [tmp_path / "000002"] * 2 and listing(tmp_path) == ["000002", "latest"]


def test_the_first_rank_checks_the_space_of_all(tmp_path, monkeypatch):
    save(tmp_path, 3, 1)
    with monkeypatch.context() as patch:
        patch.setattr("qarl.storage.disk.free_bytes", lambda path: 60_000)  # each rank's 17 kB would fit
        patch.setattr(module, "write_files", lambda *arguments, **options: pytest.fail("wrote"))
        first, *others = save(tmp_path, 3, 2)
    assert type(first) is UserError and "no space for a checkpoint (" in str(first) and "60,000 free" in str(first)
    assert all(isinstance(other, OtherRankFailed) for other in others) and listing(tmp_path) == ["000001", "latest"]


# --- damage


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Change the manifest, and make its digest fit."""

    def damage(folder: Path) -> None:
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        del manifest["sha256"]
        change(manifest)
        path.write_bytes(encode(manifest))

    return damage


ONE, TWO = "masters-r0001-of-0002.safetensors", "masters-r0002-of-0002.safetensors"
DAMAGE = {
    "flipped byte of the second rank": (lambda c: flip(c / TWO), f"{TWO}: the digest does not match"),
    "missing piece file": (lambda c: (c / TWO).unlink(), f"{TWO}: missing"),
    "no shapes": (edited(lambda m: m.pop("shapes")), "manifest.json: shapes is missing"),
    "not among the files": (
        edited(lambda m: m["files"].pop(TWO)),
        f"manifest.json: does not list {TWO} among its files",
    ),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("two")
    for step in (1, 2):
        save(directory, 2, step)
    return directory


@pytest.mark.parametrize("damage, reason", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_named_and_all_ranks_take_the_previous_checkpoint(two, tmp_path, damage, reason):
    directory = tmp_path / "checkpoints"
    shutil.copytree(two, directory, symlinks=True)
    damage(directory / "000002")

    def work(ranks: Ranks) -> tuple[int, list[str]]:
        skipped: list[str] = []
        found = CheckpointStore(directory, 0, ranks).latest_valid(skipped.append)
        assert_is_step(found, 1)
        return found.step, skipped

    results = [result for count in (1, 2) for result in as_threads(count, work)]
    assert {step for step, _ in results} == {1}, results
    for _, skipped in results:
        assert len(skipped) == 1 and reason in skipped[0] and "\n" not in skipped[0]
    with pytest.raises(CheckpointDamaged) as caught:
        load_checkpoint(directory / "000002")
    assert reason in str(caught.value)
    told = as_threads(3, lambda ranks: load_checkpoint(directory / "000002", ranks=ranks))
    assert all(type(error) is CheckpointDamaged and reason in str(error) for error in told)


# --- damage of any kind


@pytest.mark.parametrize("file", ["manifest.json", TWO])
def test_any_damage_gives_a_checkpoint_or_one_line(two, tmp_path, file):
    refused, folder = set(), tmp_path / "000002"

    def check(number: int, draw: DrawFn) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(two / "000002", folder)
        what = (damage_entry if chance(draw, 25) else damage_file)(draw, folder / file)
        try:
            found = load_checkpoint(folder)
            for members in found.tensors.values():
                for name in members:
                    assert members[name].shape == members.shape(name)
        except UserError as error:
            refused.add(number)
            assert "\n" not in str(error) and str(folder) in str(error), (number, what, error)
        except Exception as error:
            raise AssertionError(f"{number}: {what}") from error

    for number in range(20):
        with_draws("3", f"{file}-{number}", partial(check, number))
    assert len(refused) > 5
