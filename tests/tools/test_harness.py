"""Options that the benchmarks share: a file that cannot be written and a number that cannot be are refused at once."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path

import pytest
from harness import count, out_file, positive


def test_a_result_has_its_folder_before_anything_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "new/deep/out.json"
    assert out_file(str(file)) == file and file.parent.is_dir() and not file.exists()


def test_a_result_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentTypeError, match="is a folder; name a file"):
        out_file(str(tmp_path))
    with pytest.raises(ArgumentTypeError, match=r"File exists|Not a directory"):
        out_file(str(tmp_path / "file/out.json"))


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", "", "nan"])
def test_a_count_is_an_integer_from_one(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="must be an integer from 1"):
        count(text)
    assert count("12") == 12


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "x"])
def test_a_positive_number_is_finite(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="must be a number above 0"):
        positive(text)
    assert positive("1e-6") == 1e-6
