"""Files are written all or none, and the error of a failing disk names the file and the fix."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from full_disk import fill_disk

from qarl.errors import UserError
from qarl.storage.disk import require_kinds, require_output, write_together


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_all_are_written_and_replaced(tmp_path):
    files = {tmp_path / "new" / "plots" / "a.png": b"a", tmp_path / "new" / "page.html": b"page"}
    for suffix in (b"", b"2"):
        write_together({path: data + suffix for path, data in files.items()}, "--out")
        assert contents(tmp_path) == {"new/plots/a.png": b"a" + suffix, "new/page.html": b"page" + suffix}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, r"No space left on device \(70 bytes needed, [\d,]+ free\); free some space, or choose another"),
        (errno.EIO, "Input/output error; check the path and the disk"),
    ],
)
def test_if_one_file_cannot_be_written_all_are_restored_and_it_is_named(tmp_path, monkeypatch, code, words):
    write_together({tmp_path / "a": b"old"}, "--out")
    fill_disk(monkeypatch, after=1, code=code)
    with pytest.raises(UserError, match=rf"new/b: cannot be written: {words}") as caught:
        write_together({tmp_path / "a": b"x" * 30, tmp_path / "new" / "b": b"y" * 40}, "--out")
    assert "\n" not in str(caught.value)
    assert contents(tmp_path) == {"a": b"old"} and os.listdir(tmp_path) == ["a"]


def test_a_directory_that_holds_other_files_stays(tmp_path, monkeypatch):
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "mine").write_bytes(b"mine")
    fill_disk(monkeypatch)
    with pytest.raises(UserError, match="free some space"):
        write_together({tmp_path / "plots" / "a.png": b"a"}, "--out")
    assert contents(tmp_path) == {"plots/mine": b"mine"}


OBSTACLES = {  # what is at the output's path
    "a directory": lambda path: path.mkdir(parents=True),
    "a file": lambda path: (path.parent.mkdir(parents=True, exist_ok=True), path.write_text("mine")),
    "a pipe": lambda path: os.mkfifo(path),
    "a grandparent that is a file": lambda path: (shutil.rmtree(path.parents[1]), path.parents[1].write_text("mine")),
    "nothing": lambda path: None,
    "no parent": lambda path: path.parent.rmdir(),
}
FINE = {(name, folder) for name in ("nothing", "no parent") for folder in (False, True)}
FINE |= {("a file", False), ("a directory", True)}


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_an_output_that_cannot_be_written_is_one_line_before_the_work(tmp_path, obstacle, folder):
    path = tmp_path / "a" / "b" / "out"
    path.parent.mkdir(parents=True)
    OBSTACLES[obstacle](path)
    if (obstacle, folder) in FINE:
        require_output(path, "--json", folder)
    else:
        with pytest.raises(UserError, match=rf"^--json: {path}: [^\n]+; [^\n]+$|^--json: {path}: is a directory; give"):
            require_output(path, "--json", folder)


def test_a_link_that_leads_to_no_file_is_one_line_before_the_work(tmp_path):
    (tmp_path / "a").symlink_to("nowhere")
    said = r"/a: is a broken link to a file; remove it, or choose another --out$"
    with pytest.raises(UserError, match=said):
        require_kinds(tmp_path, ["a"], [], "--out")
