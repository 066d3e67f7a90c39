"""Files that are written together: all of them or none, and what a user is told where the disk refuses."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from full_disk import fill_disk

from qarl.errors import UserError
from qarl.storage.disk import write_together


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
        (errno.EDQUOT, r"Disk quota exceeded \(70 bytes needed, .* free\); remove files that count against your quota"),
        (errno.EIO, "Input/output error; check the path and the disk"),
    ],
)
def test_where_the_disk_refuses_one_of_them_all_are_as_they_were_and_it_is_named(tmp_path, monkeypatch, code, words):
    write_together({tmp_path / "a": b"old"}, "--out")
    fill_disk(monkeypatch, after=1, code=code)
    with pytest.raises(UserError, match=rf"new/b: cannot be written: {words}") as caught:
        write_together({tmp_path / "a": b"x" * 30, tmp_path / "new" / "b": b"y" * 40}, "--out")
    assert "\n" not in str(caught.value)
    assert contents(tmp_path) == {"a": b"old"} and os.listdir(tmp_path) == ["a"]


def test_a_directory_that_holds_something_else_stays(tmp_path, monkeypatch):
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "mine").write_bytes(b"mine")
    fill_disk(monkeypatch)
    with pytest.raises(UserError, match="free some space"):
        write_together({tmp_path / "plots" / "a.png": b"a"}, "--out")
    assert contents(tmp_path) == {"plots/mine": b"mine"}
