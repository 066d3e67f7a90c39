"""Files and paths from outside: every kind of thing that can stand at a path, in one line or read."""

import os
import random
import socket
import threading

import pytest

from qarl.errors import UserError
from qarl.inputs.files import NoSuchFile, Unreadable, read_bytes, read_lines, read_text
from qarl.inputs.paths import path_errors, user_path


def test_bytes_and_text_come_back(tmp_path):
    (tmp_path / "f").write_bytes("\ufeffzwölf\n".encode())
    assert read_text(tmp_path / "f") == "zwölf\n"
    assert read_bytes(tmp_path / "f") == "\ufeffzwölf\n".encode()


def make(kind: str, path):
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        os.chdir(path.parent)  # the name of a socket is short
        socket.socket(socket.AF_UNIX).bind(path.name)
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["directory", "pipe", "socket", "dangling", "loop", "device", "missing"])
def test_what_is_no_file_is_refused_without_waiting(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x"
    make(kind, path)
    with pytest.raises(Unreadable) as caught:
        read_bytes(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    assert isinstance(caught.value, NoSuchFile) == (kind in ("missing", "dangling"))


def test_a_file_below_a_file_is_missing(tmp_path):
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


def test_a_stream_is_read_to_its_end(tmp_path):
    os.mkfifo(tmp_path / "p")
    assert read_bytes(tmp_path / "p", stream=True) == b""  # nobody writes
    writer = threading.Thread(target=lambda: (tmp_path / "p").write_bytes(b"a" * 300_000))
    hold = os.open(tmp_path / "p", os.O_RDONLY | os.O_NONBLOCK)
    writer.start()
    while not (data := read_bytes(tmp_path / "p", stream=True)):
        pass
    writer.join()
    os.close(hold)
    assert data == b"a" * 300_000


def test_lines_have_numbers_and_a_limit(tmp_path):
    (tmp_path / "f").write_bytes(b"a\nbb\nc")
    assert list(read_lines(tmp_path / "f")) == [(1, b"a\n"), (2, b"bb\n"), (3, b"c")]
    with pytest.raises(Unreadable, match="line 2: has more than 2 bytes"):
        list(read_lines(tmp_path / "f", limit=2))


def test_every_text_is_a_path_or_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    parts = ["a", "~", "~nosuchuser", "/", "//", "..", "\0", "\ud800", "é" * 200, "x" * 256, "y" * 5000, " ", "\n", "."]
    refused = 0
    for _ in range(1000):
        text = "".join(rng.choices(parts, k=rng.randrange(0, 5)))
        try:
            path = user_path(text, "data.source")
        except UserError as error:
            refused += 1
            assert str(error).startswith("data.source: '")
        else:
            with path_errors("data.source"):
                path.exists()
                path.is_dir()
    assert 100 < refused < 900


@pytest.mark.parametrize(
    "fault", [OSError(5, "Input/output error"), ValueError("embedded null byte"), RuntimeError("no home directory")]
)
def test_what_a_path_raises_is_one_line(fault):
    with pytest.raises(UserError, match=r"^data\.source: .*; check the path$"), path_errors("data.source"):
        raise fault


def test_a_full_disk_is_not_a_fault_of_the_path():
    with pytest.raises(OSError, match="No space"), path_errors("here"):
        raise OSError(28, "No space left on device")
