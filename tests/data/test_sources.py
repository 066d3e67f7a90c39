"""Rows of files, directories and hub datasets."""

import json
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from qarl.config.data import DataConfig
from qarl.data.sources import load_rows
from qarl.errors import UserError

ROWS = [
    {"question": "How many?", "answer": 19, "info": {"a": [1, 2]}},
    {"question": "Wie viele — «ö»?", "answer": -3, "info": {"a": []}},
]


def load(source: Path | str, **fields) -> list[dict]:
    return load_rows(DataConfig(source=str(source), **fields))


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def test_rows_keep_nested_values_and_types(tmp_path):
    lines = write_jsonl(tmp_path / "rows.jsonl", ROWS).read_text()
    write(tmp_path / "rows.jsonl", f"{lines}\n  \n")  # blank lines are skipped
    write(tmp_path / "rows.json", json.dumps(ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    assert load(write(tmp_path / "lines.json", lines)) == ROWS  # as `Dataset.to_json` writes
    for kind in ("json", "jsonl", "parquet"):
        assert load(tmp_path / f"rows.{kind}") == ROWS
        assert load(tmp_path / f"rows.{kind}", max_rows=1) == ROWS[:1]


def test_a_key_missing_in_some_rows_is_none_there(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": "b", "answer": "1"}])
    assert load(path) == [{"prompt": "a", "answer": None}, {"prompt": "b", "answer": "1"}]


def test_csv_types_a_column_only_if_nothing_of_its_text_is_lost(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('count,code,price,ratio,text\n19,007,3.10,0.5,"a, ""b""\nc"\n-3,8,2.5,1.25,d\n')
    assert load(path) == [
        {"count": 19, "code": "007", "price": "3.10", "ratio": 0.5, "text": 'a, "b"\nc'},
        {"count": -3, "code": "8", "price": "2.5", "ratio": 1.25, "text": "d"},
    ]


@pytest.mark.parametrize(
    ("files", "split", "found"),
    [
        (["train.jsonl", "test.jsonl"], "test", ["test.jsonl"]),
        (["data/train-00001-of-2.jsonl", "data/train-00000-of-2.jsonl"], None, ["data/train-0000%d-of-2.jsonl"]),
        (["problems.jsonl"], None, ["problems.jsonl"]),  # without a word for a split
        (["train.jsonl", "dataset_info.json", "README.md"], None, ["train.jsonl"]),
        (["train.jsonl", "test.jsonl"], "validation", r"no `validation` in .*; there are: test, train"),
        (["data-0.arrow", "dataset_info.json"], None, r"no .* file in .*; save_to_disk wrote it: use to_parquet"),
        (["train.jsonl", "train.csv"], None, r"exists as \.csv and \.jsonl"),
    ],
)
def test_files_of_a_directory_are_those_of_the_split_in_order(tmp_path, files, split, found):
    for file in files:
        write_jsonl(tmp_path / file, [{"prompt": file}])
    fields = {} if split is None else {"split": split}
    if isinstance(found, str):
        with pytest.raises(UserError, match=found):
            load(tmp_path, **fields)
    else:
        found = [name % i for name in found for i in range(2)] if "%d" in found[0] else found
        assert [row["prompt"] for row in load(tmp_path, **fields)] == found


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"prompt": 1}\n{"prompt": }\n', r"a.jsonl line 2: not valid JSON \(column 12: "),
        ("a.json", '[\n{"prompt": 1},\n]', r"a.json: not valid JSON \((line 2 column 14|line 3 column 1): "),
        ("a.json", '{"prompt": 1}', r"a.json: holds an object, expected a list of objects"),
        ("a.csv", "prompt,answer\n1,2\n3\n", r"a.csv line 3: 1 cells, the header has 2"),
        ("a.csv", "prompt,prompt\n1,2\n", r"a.csv line 1: a column name appears twice"),
        ("a.parquet", "not parquet", r"a.parquet: not a readable Parquet file"),
        ("a.txt", "hello", r"a.txt: unknown file type `.txt`"),
        ("a.jsonl", "", r"a.jsonl` \(split `train`\) has no rows"),
        ("a.jsonl", "", r"data.split: a single file has only the split `train`, got `test`"),
    ],
)
def test_bad_file_is_one_line_with_its_place(tmp_path, name, text, message):
    with pytest.raises(UserError, match=message) as caught:
        load(write(tmp_path / name, text), **({"split": "test"} if "only the split" in message else {}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["missing.jsonl", "data/of/mine"])
def test_missing_path_is_refused_without_asking_the_hub(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no file or directory"):
        load(source)


def test_hub_dataset_is_asked_for_subset_split_and_first_rows(monkeypatch):
    asked = []

    def load_dataset(name, subset, split):
        asked.append((name, subset, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load("openai/gsm8k", subset="main", split="test", max_rows=1) == ROWS[:1]
    assert asked == [("openai/gsm8k", "main", "test")]


def test_float32_is_the_number_that_was_written(tmp_path, monkeypatch):
    kind = pyarrow.list_(pyarrow.struct([("x", pyarrow.float32())]))
    numbers = pyarrow.array([0.1, None], pyarrow.float32())
    table = pyarrow.table({"answer": numbers, "parts": pyarrow.array([[{"x": 3.14}], []], kind)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    rows = [{"answer": 0.1, "parts": [{"x": 3.14}]}, {"answer": None, "parts": []}]
    assert load(tmp_path / "a.parquet") == rows
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset(table))
    assert load("openai/gsm8k") == rows


def test_hub_failures_become_one_line(monkeypatch):
    for error, message in (
        (datasets.exceptions.DatasetNotFoundError("Dataset 'a/b'\n doesn't exist"), "cannot load `a/b` from the hub"),
        (ValueError("Unknown split \"x\". Should be one of ['train']."), "Should be one of"),
    ):

        def load_dataset(*_, error=error, **__):
            raise error

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        with pytest.raises(UserError, match=message) as caught:
            load("a/b")
        assert "\n" not in str(caught.value)
