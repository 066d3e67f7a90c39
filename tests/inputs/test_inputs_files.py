"""Files and paths from outside: whatever is at a path is read or refused in one line."""

import os
import socket

import pytest

from qarl.errors import UserError
from qarl.inputs.files import NoSuchFile, Unreadable, read_bytes, read_lines, read_text
from qarl.inputs.paths import path_errors


def test_bytes_text_and_numbered_lines_are_read(tmp_path):
    (tmp_path / "f").write_bytes("\ufeffzwölf\n".encode())
    assert read_text(tmp_path / "f") == "zwölf\n"
    assert read_bytes(tmp_path / "f") == "\ufeffzwölf\n".encode()
    (tmp_path / "f").write_bytes(b"a\nbb\nc")
    assert list(read_lines(tmp_path / "f")) == [(1, b"a\n"), (2, b"bb\n"), (3, b"c")]
    with pytest.raises(Unreadable, match="line 2: has more than 2 bytes"):
        list(read_lines(tmp_path / "f", limit=2))


def make_socket(path):
    os.chdir(path.parent)  # the name of a socket must be short
    socket.socket(socket.AF_UNIX).bind(path.name)


OBSTACLES = {
    **{"directory": lambda path: path.mkdir(), "pipe": os.mkfifo, "socket": make_socket, "missing": lambda path: None},
    **{to: lambda path, to=to: path.symlink_to(to) for to in ("dangling", "x", "/dev/zero")},
}


@pytest.mark.parametrize("kind", OBSTACLES)
def test_what_is_no_file_is_refused_without_waiting(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x"
    OBSTACLES[kind](path)
    with pytest.raises(Unreadable) as caught:
        read_bytes(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    assert isinstance(caught.value, NoSuchFile) == (kind in ("missing", "dangling"))
    (tmp_path / "f").touch()
    with pytest.raises(NoSuchFile):
        read_bytes(tmp_path / "f" / "g")


def test_the_limit_holds_for_files_and_endless_streams(tmp_path):
    (tmp_path / "f").write_bytes(b"x" * 101)
    assert len(read_bytes(tmp_path / "f", limit=101)) == 101
    with pytest.raises(Unreadable, match="more than 100 bytes"):
        read_bytes(tmp_path / "f", limit=100)
    with pytest.raises(Unreadable, match="more than 1,000 bytes"):
        read_bytes(tmp_path.joinpath("/dev/zero"), limit=1000, stream=True)


def test_an_error_of_a_path_is_one_line_but_not_a_full_disk():
    with pytest.raises(UserError, match=r"^data\.source: .*; check the path$"), path_errors("data.source"):
        raise OSError(5, "Input/output error")
    with pytest.raises(OSError, match="No space"), path_errors("here"):
        raise OSError(28, "No space left on device")
