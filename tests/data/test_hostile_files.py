"""Files and sources that nobody would write on purpose: each is read, or is one line that names its place."""

import datetime
import decimal
import uuid

import numpy
import pyarrow
import pyarrow.parquet
import pytest

from qarl.config.data import DataConfig
from qarl.data import PromptStream, build_prompts
from qarl.data.sources import load_rows
from qarl.data.values import NotPlain, plain
from qarl.errors import UserError


def one_line(error: BaseException) -> bool:
    return "\n" not in str(error) and str(error).isprintable() and len(str(error)) < 1500


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


# file name -> content, and what the line says; None: it is read
FILES: dict[str, tuple[str, bytes, str | None]] = {
    "a lone surrogate": ("a.jsonl", b'{"prompt": "ok"}\n{"prompt": "\\ud800"}', "line 2: .*lone surrogate"),
    "an integer of 5,000 digits": ("a.jsonl", b'{"prompt": "p", "answer": %s}' % (b"7" * 5000), "line 1: the integer"),
    "a float beyond floats": ("a.jsonl", b'{"prompt": "p", "answer": 1e999}', "line 1: the number 1e999"),
    "100,000 levels": ("a.json", b'[{"prompt": %s}]' % nested(100_000).encode(), "nested deeper than 64"),
    "a csv in UTF-16": ("a.csv", "prompt\nhallo\n".encode("utf-16"), "not UTF-8 text .line 1, byte 0xff at 0"),
    "an integer of 40 digits": ("a.jsonl", b'{"prompt": "p", "answer": %s}' % (b"7" * 40), None),
    "a byte order mark": ("a.jsonl", b'\xef\xbb\xbf{"prompt": "a"}', None),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_or_refused_in_one_line(tmp_path, tokenizer, name):
    file, content, said = FILES[name]
    (tmp_path / file).write_bytes(content)
    config = DataConfig(source=str(tmp_path / file), chat_template=False, max_prompt_length=10**7)
    if said is None:
        prompts, _ = build_prompts(config, tokenizer, 10**8, 1)
        PromptStream(prompts, 0, True).state()
        return
    with pytest.raises(UserError, match=said) as caught:
        build_prompts(config, tokenizer, 10**8, 1)
    assert one_line(caught.value) and str(tmp_path / file) in str(caught.value)


ODD_COLUMNS = {
    "date": (datetime.date(2026, 2, 3), "2026-02-03"),
    "decimal": (decimal.Decimal("3.10"), "3.10"),
    "bytes": (b"\0\xff", "AP8="),
}


@pytest.mark.parametrize("name", ODD_COLUMNS)
def test_parquet_columns_that_json_has_no_type_for_become_text(tmp_path, name):
    given, expected = ODD_COLUMNS[name]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "p", "x": given}]), path)
    assert load_rows(DataConfig(source=str(path))) == [{"prompt": "p", "x": expected}]


def test_plain_values_stay_and_others_are_refused():
    kept = {"a": [1, 2.5, None, True, (1, "x")], 3: {"%": "y"}, (1, 2): 10**3999}
    assert repr(plain(kept)) == repr(kept)
    assert plain(numpy.arange(3)) == [0, 1, 2] and type(plain(numpy.float32(0.5))) is float
    assert type(plain(numpy.str_("x"))) is str
    assert plain(uuid.UUID(int=5)) == "00000000-0000-0000-0000-000000000005"
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    others = ((10**4000, "4,000 digits"), (deep, "64 levels"), (object(), "type object"), ({1, 2}, "type set"))
    for value, said in others:
        with pytest.raises(NotPlain, match=said):
            plain([value])
