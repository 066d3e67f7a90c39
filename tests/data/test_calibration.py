"""The calibration text: windows, prompts, seeds and what is refused."""

import pytest

from qarl.config.quant import CalibrationConfig
from qarl.data.calibration import calibration_sequences
from qarl.errors import UserError
from qarl.inputs.files import Unreadable
from qarl.types import Prompt

TEXT = "".join(chr(97 + i % 26) for i in range(1000))


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def sequences(tokenizer, context=512, prompts=(), **config):
    return calibration_sequences(CalibrationConfig(**config), tokenizer, context, prompts)


def test_windows_are_cut_from_the_text_and_chosen_by_the_seed(tokenizer, source):
    whole = sequences(tokenizer, source=source, samples=100, length=30)
    ids = tokenizer(TEXT)["input_ids"]
    assert sorted(whole) == sorted(ids[start : start + 30] for start in range(0, 990, 30))
    some = sequences(tokenizer, source=source, samples=5, length=30)
    assert len(some) == 5 and all(one in whole for one in some)
    assert some == sequences(tokenizer, source=source, samples=5, length=30)
    assert some != sequences(tokenizer, source=source, samples=5, length=30, seed=1)


@pytest.mark.parametrize(
    ("length", "context", "expected"), [(5000, 4000, [1000]), (5000, 400, [400, 400]), (1000, 9999, [1000])]
)
def test_windows_are_no_longer_than_the_context_and_the_text(tokenizer, source, length, context, expected):
    assert [len(one) for one in sequences(tokenizer, context, source=source, length=length)] == expected


def test_prompts_of_the_run_are_cut_to_the_length(tokenizer):
    prompts = [Prompt(i, list(range(i + 1)), "") for i in range(20)]
    found = sequences(tokenizer, prompts=prompts, source="prompts", samples=8, length=4)
    assert len(found) == 8 and all(one == list(range(len(one))) and len(one) <= 4 for one in found)


def test_the_default_is_text_of_python_s_documentation(tokenizer):
    (only,) = sequences(tokenizer, samples=1, length=400)
    assert len(only) == 400


@pytest.mark.parametrize("content", [b" \n ", b"\xff\xfe\x00"])
def test_a_text_without_text_is_refused(tokenizer, tmp_path, content):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises((UserError, Unreadable), match="text"):
        sequences(tokenizer, source=str(path))
