"""Checkpoints: round trip, atomicity under kill -9, full disks, damage, pruning."""

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch
from full_disk import fill_disk
from whole_pieces import whole_pieces

from qarl.errors import UserError
from qarl.storage import checkpoint as module
from qarl.storage import pieces
from qarl.storage.checkpoint import CheckpointStore
from qarl.storage.loading import CheckpointDamaged, load_checkpoint


def small(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"masters": {"w": torch.full((64, 64), float(step)), "b": torch.arange(3) + step}}


def store(tmp_path: Path, keep_last: int = 0) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep_last)


def hidden(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith(".")]


def assert_is_step(found: module.Checkpoint, step: int) -> None:
    assert found.step == step
    for name, tensor in small(step)["masters"].items():
        assert torch.equal(found.tensors["masters"][name], tensor), name
    assert found.state == {"step": step}


def test_a_checkpoint_holds_its_state_and_the_size_and_digest_of_every_file(tmp_path):
    state = {"rng": [2**64 - 1, -3], "position": {"epoch": 1, "order": [3, 1]}, "loss": 1e-6 / 3, "text": "π\ud800"}
    path = store(tmp_path).save(3, whole_pieces(small(3)), state)
    assert load_checkpoint(path).state == state
    manifest = json.loads((path / "manifest.json").read_text())
    assert set(manifest["files"]) == {p.name for p in path.iterdir()} - {"manifest.json"}
    for name, entry in manifest["files"].items():
        data = (path / name).read_bytes()
        assert entry == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@pytest.mark.parametrize("keep_last, kept", [(0, [1, 2, 3, 4]), (1, [4]), (3, [2, 3, 4])])
def test_the_newest_are_kept_and_latest_is_a_relative_link_to_the_newest(tmp_path, keep_last, kept):
    checkpoints = store(tmp_path, keep_last)
    for step in (1, 2, 3, 4):
        checkpoints.save(step, whole_pieces(small(step)), {"step": step})
        assert os.readlink(checkpoints.directory / "latest") == f"00000{step}"
    assert checkpoints.steps() == kept and hidden(checkpoints.directory) == []
    assert_is_step(load_checkpoint(checkpoints.directory / "latest"), 4)
    shutil.copytree(tmp_path, tmp_path / "copy")  # `latest` is a directory there
    store(tmp_path / "copy").save(5, whole_pieces(small(5)), {"step": 5})
    assert os.readlink(tmp_path / "copy/checkpoints/latest") == "000005"
    assert checkpoints.discard_after(2) == [step for step in kept if step > 2]
    assert checkpoints.steps() == [step for step in kept if step <= 2]
    if checkpoints.steps():
        assert os.readlink(checkpoints.directory / "latest") == "000002"


def test_saving_a_step_again_replaces_it_and_pruning_spares_what_was_just_written(tmp_path):
    checkpoints = store(tmp_path, 1)
    assert checkpoints.latest_valid(pytest.fail) is None
    with pytest.raises(UserError, match="no such checkpoint"):
        load_checkpoint(checkpoints.path(5))
    checkpoints.save(5, whole_pieces(small(1)), {"step": 1})
    checkpoints.save(5, whole_pieces(small(5)), {"step": 5})
    assert_is_step(checkpoints.latest_valid(pytest.fail), 5)
    assert hidden(checkpoints.directory) == []
    checkpoints.save(3, whole_pieces(small(3)), {"step": 3})
    assert checkpoints.steps() == [3, 5]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "flipped state byte": (lambda c: flip(c / "state.json"), "state.json: the digest"),
    "missing manifest": (lambda c: (c / "manifest.json").unlink(), "manifest.json: missing"),
}


@pytest.mark.parametrize("damage, reason", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_named_and_the_previous_checkpoint_is_used(tmp_path, damage, reason):
    checkpoints = store(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, whole_pieces(small(step)), {"step": step})
    damage(checkpoints.path(2))
    skipped: list[str] = []
    assert_is_step(checkpoints.latest_valid(skipped.append), 1)
    assert len(skipped) == 1 and reason in skipped[0] and "\n" not in skipped[0]
    with pytest.raises(CheckpointDamaged, match=reason):
        load_checkpoint(checkpoints.path(2))


def test_if_all_are_damaged_or_of_another_format_the_user_is_told_the_fix(tmp_path, monkeypatch):
    checkpoints = store(tmp_path)
    checkpoints.save(1, whole_pieces(small(1)), {})
    flip(checkpoints.path(1) / "masters.safetensors")
    with pytest.raises(UserError, match=r"all 1 checkpoints are damaged.*choose another train.run_dir"):
        checkpoints.latest_valid(lambda line: None)
    with monkeypatch.context() as patch:
        patch.setattr(pieces, "WHOLE", 99)
        checkpoints.save(1, whole_pieces(small(1)), {})
    with pytest.raises(UserError, match="checkpoint format 99") as caught:
        load_checkpoint(checkpoints.path(1))
    assert not isinstance(caught.value, CheckpointDamaged)


# Of masters, state, manifest and the directory, the first that fails.
@pytest.mark.parametrize(("files", "code"), [(0, errno.EDQUOT), (2, errno.EIO), (3, errno.ENOSPC)])
def test_a_failing_disk_leaves_only_the_previous_checkpoint(tmp_path, monkeypatch, files, code):
    checkpoints = store(tmp_path, 1)
    checkpoints.save(1, whole_pieces(small(1)), {"step": 1})
    with monkeypatch.context() as patch:
        fill_disk(patch, files, code)
        with pytest.raises(UserError) as caught:
            checkpoints.save(2, whole_pieces(small(2)), {"step": 2})
    message = str(caught.value)
    assert "\n" not in message and str(checkpoints.path(2)) in message and os.strerror(code) in message
    assert ("bytes needed" in message and "free)" in message) == (code != errno.EIO)
    assert sorted(p.name for p in checkpoints.directory.iterdir()) == ["000001", "latest"]
    assert_is_step(checkpoints.latest_valid(pytest.fail), 1)


@pytest.mark.parametrize(
    ("process", "host", "age_s", "stays"),
    [
        ("dead", None, 0, False),
        ("alive", None, 0, True),
        ("dead", "elsewhere", 0, True),
        ("alive", "elsewhere", 3700, False),  # other hosts cannot be asked: their leftovers are removed after an hour
    ],
)
def test_leftovers_are_removed_unless_their_process_may_live(tmp_path, process, host, age_s, stays):
    child = subprocess.Popen(["true"])
    child.wait()
    pid = os.getppid() if process == "alive" else child.pid
    path = tmp_path / "checkpoints" / f".tmp-000007-{pid}-{host or socket.gethostname()}"
    path.mkdir(parents=True)
    os.utime(path, (time.time() - age_s,) * 2)
    store(tmp_path)
    assert path.exists() == stays


def test_kill_9_at_random_points_always_leaves_the_last_finished_checkpoint(tmp_path):
    # Forks, because five imports of torch would take longer than the rest of the test.
    rng = random.Random(0)
    directory = tmp_path / "checkpoints"
    finished = 0
    for _ in range(5):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                checkpoints = CheckpointStore(directory, keep_last=1)
                for turn in range(1, 100_000):
                    step = finished + turn
                    value = torch.full((2000,), float(step))
                    group = {f"t{i}": value for i in range(8)}
                    checkpoints.save(step, whole_pieces({"masters": group, "optimizer": group}), {"step": step})
                    os.write(write_end, f"{step}\n".encode())
            finally:
                os._exit(1)
        os.close(write_end)
        time.sleep(rng.uniform(0.02, 0.25))
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, "the saver failed by itself"
        with open(read_end) as pipe:
            steps = pipe.read().split()
        finished = int(steps[-1]) if steps else finished
        survivor = CheckpointStore(directory, keep_last=1).latest_valid(pytest.fail)
        if survivor is None:
            assert finished == 0
            continue
        # The interrupted save may have become visible before it was reported.
        assert survivor.step in (finished, finished + 1)
        finished = survivor.step
        for group in survivor.tensors.values():
            assert all(torch.equal(t, torch.full((2000,), float(finished))) for t in group.values())
        assert [name for name in hidden(directory) if name != ".latest"] == []
    assert finished > 0
