"""Multiple-choice rows: letters in an order of the seed, the right one kept track of, and clear refusals."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qarl.config import DataConfig
from qarl.data.choices import LETTERS, letter_choices
from qarl.errors import UserError


def lettered(row: dict, **choices) -> dict:
    config = DataConfig(source="rows.jsonl", prompt_template="{prompt} {choices}", choices=choices)
    (found,) = letter_choices([row], config)
    return found


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    options=st.lists(st.text("abcxyz", min_size=1), min_size=2, max_size=26, unique=True),
    seed=st.none() | st.integers(0, 50),
    data=st.data(),
)
def test_the_letter_is_that_of_the_right_option_in_any_order(options, seed, data):
    right = data.draw(st.integers(0, len(options) - 1))
    row = {"options": options, "index": right, "text": options[right], "letter": LETTERS[right]}
    found = {
        how: lettered(row, options=["options"], right=how, shuffle_seed=seed) for how in ("index", "text", "letter")
    }
    for how in ("index", "letter"):  # a text may itself be a letter of another option
        lines = dict(line.split(". ", 1) for line in found[how]["choices"].splitlines())
        assert sorted(lines.values()) == sorted(options) and list(lines) == list(LETTERS[: len(options)])
        assert lines[found[how]["answer"]] == options[right]
    assert seed is not None or found["index"]["answer"] == LETTERS[right]


def test_one_column_per_option_has_the_right_one_first_and_rows_are_shuffled_differently():
    rows = [{"right": "yes", "w1": "no", "w2": "maybe"}] * 30
    config = DataConfig(
        source="rows.jsonl", prompt_template="{choices}", choices={"options": ["right", "w1", "w2"], "shuffle_seed": 3}
    )
    found = letter_choices(rows, config)
    assert {row["answer"] for row in found} == {"A", "B", "C"} and found == letter_choices(rows, config)
    assert all(f"{row['answer']}. yes" in row["choices"] for row in found)


def test_labels_that_are_numbers_become_letters():
    row = {"choices": {"text": ["a", "b"], "label": ["1", "2"]}, "text": "2", "int": 1}  # the integer is no index
    first, found = (lettered(row, options=["choices.text"], labels="choices.label", right=r) for r in ("int", "text"))
    assert (first["answer"], found["answer"], found["choices"]) == ("A", "B", "A. a\nB. b")


@pytest.mark.parametrize(
    ("row", "choices", "said"),
    [
        ({"o": ["a", "b"], "r": "c"}, {"options": ["o"], "right": "r"}, "right option 'c' is not one of its options"),
        ({"o": ["a"]}, {"options": ["o"]}, "has 1 options; 2 to 26"),
        ({"o": {"A": "x", "B": "y"}}, {"options": ["o"]}, "`o` must be a list of options without null"),
        ({"o": ["a", "b"], "l": ["x"], "r": 0}, {"options": ["o"], "right": "r", "labels": "l"}, "1 labels"),
    ],
)
def test_rows_without_a_usable_question_are_refused_by_place(row, choices, said):
    with pytest.raises(UserError, match=r"^data\.choices: row 0 of `rows\.jsonl`") as caught:
        lettered(row, **choices)
    assert said in str(caught.value)


def test_options_that_no_prompt_shows_are_refused():
    with pytest.raises(ValueError, match="the options are not shown"):
        DataConfig(source="rows.jsonl", prompt_template="{prompt}", choices={"options": ["a", "b"]})
