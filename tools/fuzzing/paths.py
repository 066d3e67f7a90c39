"""Hostile paths and names of files, and the files that the paths lead to."""

from __future__ import annotations

import os
import stat
from pathlib import Path

ESCAPE, OVERRIDE = "\x1b[31mred", "abc\u202edef"  # what a terminal would act on

# Made in the working directory by `make_traps`.
PATHS = (
    "~nosuchuser/x",
    "~",
    "\0",
    "a\0b",
    "n" * 300,
    "p/" * 2_500,
    "folder",
    "file",
    "file/below",
    "dangling",
    "loop",
    "fifo",
    "zero",
    "null",
    "full",
    "/proc/self/mem",
    "/proc/nonexistent/x",
    "/proc/self/fd/1",
    ".",
    "..",
    "",
    "../../x",
    "folder//x",
    "\ud800",
    ESCAPE,
    OVERRIDE,
    "new\nline",
    " ",
    "file.json",
    "folder.jsonl",
    "noaccess/x",
    "empty.yaml",
    "x" * 5_000 + ".json",
)

# Of files, steps and tensors, where a plain one is expected.
NAMES_OF_FILES = (
    "",
    ".",
    "..",
    "../x",
    "../../model/config.json",
    "/etc/passwd",
    "/dev/zero",
    "a/b",
    "a\0b",
    "n" * 300,
    "²²²",
    "٣٣٣٣٣٣",
    "000002 ",
    "-00001",
    "0" * 300,
    "9" * 300,
    "000000",
    "999999999",
    "1e6",
    "\ud800",
    ESCAPE,
    OVERRIDE,
    "new\nline",
    "state.json",
    "manifest.json",
    "con.safetensors",
)


def make_traps(directory: Path) -> None:
    """The files, folders, links and devices that `PATHS` names.

    Devices are this directory's own: a command that replaces its output file would replace /dev/null otherwise.
    """
    (directory / "folder").mkdir()
    (directory / "folder.jsonl").mkdir()
    (directory / "noaccess").mkdir(mode=0o000)
    (directory / "file").write_text("some text\n")
    (directory / "file.json").write_text("[]")
    (directory / "empty.yaml").touch()
    (directory / "dangling").symlink_to("nowhere/at/all")
    (directory / "loop").symlink_to("loop")
    os.mkfifo(directory / "fifo")
    for name, minor in (("zero", 5), ("null", 3), ("full", 7)):
        try:
            os.mknod(directory / name, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
        except PermissionError:  # no right to make one: then none to replace one in /dev either
            assert os.geteuid() != 0, "this root may not make devices, and must not hand out those of /dev"
            (directory / name).symlink_to(f"/dev/{name}")
