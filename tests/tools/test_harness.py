"""Options shared by the benchmarks: unwritable files and invalid numbers are refused at once."""

from argparse import ArgumentTypeError
from pathlib import Path

import pytest
from harness import count, out_file, positive


def test_files_counts_and_positive_numbers_are_checked_at_once(tmp_path: Path) -> None:
    file = tmp_path / "new/deep/out.json"
    assert out_file(str(file)) == file and file.parent.is_dir() and not file.exists()
    with pytest.raises(ArgumentTypeError, match="is a directory; give a file"):
        out_file(str(tmp_path))
    wrong = {count: ["0", "-1", "1.5", "x", "", "nan"], positive: ["0", "-1", "nan", "inf", "x"]}
    for read, message in ((count, "must be an integer from 1"), (positive, "must be a number above 0")):
        for text in wrong[read]:
            with pytest.raises(ArgumentTypeError, match=message):
                read(text)
    assert (count("12"), positive("1e-6")) == (12, 1e-6)
