"""Atomic exports: full disks, signals, leftovers of killed exports, two exports at once."""

import os
import signal

import pytest
from full_disk import fill_disk
from tiny_exports import TinyRun, entries, save_run

from qarl.errors import UserError
from qarl.exporting.staging import require_vacant


@pytest.fixture
def run(tiny_model, tmp_path) -> TinyRun:
    return save_run(tmp_path / "run", tiny_model(), steps=(4,))


def test_too_little_space_is_refused_before_a_tensor_is_written(run, tmp_path, monkeypatch):
    monkeypatch.setattr("qarl.storage.disk.free_bytes", lambda path: 20_000)
    monkeypatch.setattr("qarl.exporting.writer._write_tensors", lambda *arguments: pytest.fail("wrote"))
    with pytest.raises(UserError, match=r"no space for the export \([\d,]+ bytes needed, 20,000 free\); .*another OUT"):
        run.export(tmp_path / "out")
    assert entries(tmp_path) == ["run"]


@pytest.mark.parametrize("files", [0, 5])
def test_a_disk_that_fills_up_leaves_nothing(run, tmp_path, monkeypatch, files):
    with monkeypatch.context() as patch:
        fill_disk(patch, files)
        with pytest.raises(UserError, match=r"out: cannot be written: No space left on device .*choose another OUT"):
            run.export(tmp_path / "out")
    assert entries(tmp_path) == ["run"]


def test_ctrl_c_leaves_nothing_and_no_new_parent(run, tmp_path):
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.export(tmp_path / "new" / "deep" / "out", progress=stop)
    assert entries(tmp_path) == ["run"]


def test_the_next_export_clears_what_a_killed_one_left(run, tmp_path):
    pid = os.fork()
    if pid == 0:
        try:
            run.export(tmp_path / "out", progress=lambda done, total: os.kill(os.getpid(), signal.SIGKILL))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert len(entries(tmp_path)) == 2, "the killed export left nothing to clear"
    run.export(tmp_path / "out")
    assert entries(tmp_path) == ["out", "run"]
    assert sum(name.endswith(".safetensors") for name in entries(tmp_path / "out")) == 1


def test_an_output_in_use_is_refused(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "file").touch()
    for name, reason in (("file", "not a directory"), ("full", "is not empty")):
        with pytest.raises(UserError, match=reason):
            require_vacant(tmp_path / name)
