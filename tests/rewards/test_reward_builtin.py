"""The built-in rewards, called as functions."""

from decimal import Decimal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from math_cases import GSM8K

from qarl.config.reward import BUILTIN_REWARDS
from qarl.data.tasks import generate
from qarl.errors import UserError
from qarl.rewards.builtin import choice, chosen_letter, exact, final_answer, format, length, overlong, regex
from qarl.rewards.loader import BUILTINS
from qarl.rewards.mathematics import math
from qarl.rewards.programs import code


def score(function, completions: list[str], answer: object = None, **kwargs) -> list[float]:
    columns = {} if answer is None else {"answer": [answer] * len(completions)}
    return function(completions=completions, prompts=["p"] * len(completions), other=[1], **columns, **kwargs)


def test_config_knows_the_same_builtins():
    assert sorted(BUILTIN_REWARDS) == sorted(BUILTINS)


@pytest.mark.parametrize(
    ("answer", "text"), [(GSM8K, "72"), ("#### 1\n#### 2 ", "2"), (" 72 ", "72"), (72, "72"), ("#### -1,000", "-1,000")]
)
def test_final_answer(answer, text):
    assert final_answer(answer) == text


def test_math_reads_the_column_of_its_option():
    assert math(["5"], ["p"], column="solution", solution=["#### 5"], answer=["6"]) == [1.0]


def test_math_refuses_an_unparsable_ground_truth():
    with pytest.raises(ValueError, match="no answer in the ground truth"):
        score(math, ["5"], "#### ")


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, [1.0, 1.0, 0.0, 0.0]), ({"strip": False}, [1.0, 0.0, 0.0, 0.0]), ({"casefold": True}, [1.0, 1.0, 1.0, 0.0])],
)
def test_exact(options, expected):
    assert score(exact, ["Yes", " Yes\n", "yes", "Yes."], "Yes", **options) == expected


@pytest.mark.parametrize(
    ("completions", "answer", "options", "expected"),
    [
        (["so 12", "none"], None, {"pattern": r"\d+"}, [1.0, 0.0]),  # without a group: any match
        (["19", " 19 and more"], "19", {"pattern": r"^\s*(-?\d+)", "group": 1}, [1.0, 1.0]),
        (["-19", "the 19", "", "190"], "19", {"pattern": r"^\s*(-?\d+)", "group": 1}, [0.0] * 4),
        (["#### 72", "#### 7"], GSM8K, {"pattern": r"#### (?P<n>\d+)", "group": "n"}, [1.0, 0.0]),
        (["b"], "a", {"pattern": "(a)|b", "group": 1}, [0.0]),  # the group took no part
    ],
)
def test_regex_compares_its_group_with_the_final_answer(completions, answer, options, expected):
    assert score(regex, completions, answer, **options) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.0, -5.0, -11.0]),
        ({"unit": "words"}, [0.0, -1.0, -3.0]),
        ({"max": 10}, [0.0, -0.5, -1.0]),
        ({"target": 10}, [-1.0, -0.5, -0.1]),
        ({"unit": "words", "target": 2}, [-1.0, -0.5, -0.5]),
    ],
)
def test_length(options, expected):
    assert score(length, ["", "abcde", "one two six"], **options) == pytest.approx(expected, abs=1e-15)


def test_format_takes_a_pattern():
    assert score(format, ["a\nb", "ab", "b"], pattern="a.*b") == [1.0, 1.0, 0.0]


@pytest.fixture(scope="module")
def reasoning_gym():
    pytest.importorskip("reasoning_gym")
    from qarl.rewards.reasoning import reasoning_gym

    return reasoning_gym


@pytest.fixture(scope="module")
def chain_sum(reasoning_gym) -> dict[str, list]:
    rows = generate("reasoning-gym:chain_sum", {"size": 3, "seed": 0})
    return {name: [row[name] for row in rows] for name in ("answer", "entry")}


def test_reasoning_gym_scores_the_bare_answer(reasoning_gym, chain_sum):
    completions = [f" {chain_sum['answer'][0]}\n", "wrong", ""]
    assert reasoning_gym(completions, ["p"] * 3, **chain_sum) == [1.0, 0.0, 0.0]


def test_reasoning_gym_scores_with_the_options_of_the_task(reasoning_gym):
    # decimal_arithmetic forgives one unit in the last of its configured places, by default the sixth.
    def off_by_a_hundredth(**options: int) -> float:
        (row,) = generate("reasoning-gym:decimal_arithmetic", {"size": 1, "seed": 3, **options})
        return reasoning_gym([str(Decimal(row["answer"]) + Decimal("0.01"))], ["p"], entry=[row["entry"]])[0]

    assert off_by_a_hundredth() == 0.0
    assert off_by_a_hundredth(min_num_decimal_places=2, max_num_decimal_places=2) == 1.0


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (exact, {"column": "gold"}, "no data column `gold`; available: answer, other"),
        (math, {"timeout_s": 0.5}, "timeout_s must be at least 1"),
        (regex, {"pattern": "("}, "is not a regular expression"),
        (regex, {"pattern": "a", "group": 1}, "group 1 is not in the pattern"),
        (length, {"target": 5, "max": 5}, "target or max, not both"),
        (overlong, {"max": 0, "buffer": 1}, "^max "),
        (overlong, {"max": 8, "buffer": 9}, "^buffer "),
        (overlong, {"max": 8, "buffer": 0}, "^buffer "),
        (code, {"timeout_s": 0, "isolation": "process"}, "timeout_s"),
        (code, {"memory_mib": -1, "isolation": "process"}, "memory_mib"),
        (code, {"max_tests": 0, "isolation": "process"}, "max_tests"),
    ],
)
def test_options_and_columns_are_checked_on_an_empty_batch(function, options, message):
    with pytest.raises(UserError, match=message):
        function([], [], answer=[], other=[], tests=[], completion_ids=[], **options)


PARTS = ["<think>a</think>", "<answer>b</answer>", "\n", " ", "c", "<think>", "</think>", "<answer>", "</answer>"]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([*PARTS[:2] * 4, *PARTS]), min_size=2, max_size=5))
@example(PARTS[:2])
@example([PARTS[0], "\n", PARTS[1], " "])
def test_format_default_accepts_one_think_and_one_answer_block_only(parts):
    text, both = "".join(parts), PARTS[0] + PARTS[1]
    right = text.split() == [both] or text.split() == PARTS[:2]
    assert score(format, [text, both, both + PARTS[1]]) == [float(right), 1.0, 0.0]
    if text.startswith("<think>"):  # the chat template of DeepSeek R1 begins the response with it
        assert format([text[7:], text], ["a<think>\n"] * 2) == [float(right), 0.0]


THINKING = [
    ("<think>yes</think>yes", "p", 1.0),
    ("<think>yes</think>no", "p", 0.0),
    ("yes", "p<think>", 0.0),
    ("no</think>yes", "p<think>", 1.0),
    ("yes<think>", "p", 0.0),
    ("yes", "<think> and </think>", 1.0),
]


@pytest.mark.parametrize(("completion", "prompt", "expected"), THINKING)
def test_exact_and_regex_count_what_follows_a_think_block(completion, prompt, expected):
    pattern = {"pattern": "^\\s*(yes)", "group": 1}
    assert exact([completion], [prompt], answer=["yes"]) == [expected]
    assert regex([completion], [prompt], answer=["yes"], **pattern) == [expected]
    assert regex([completion], [prompt], answer=["yes"], think_tags=None, pattern="(yes)", group=1) == [1.0]
    assert regex([completion], [prompt], pattern="yes") == [1.0]  # without a group: anywhere
    assert exact([completion], [prompt], answer=[completion], think_tags=None) == [1.0]


def test_a_regex_with_a_tag_in_it_reads_think_blocks_itself():
    pattern = "<think>.*</think>\\s*<answer>(.*?)</answer>"
    completion = "<think>a</think><answer>yes</answer>"
    assert regex([completion], ["p"], answer=["yes"], pattern=pattern, group=1) == [1.0]


@pytest.mark.parametrize("entry", [None, {}, {"metadata": {}}])
def test_reasoning_gym_names_what_an_entry_lacks(reasoning_gym, entry):
    with pytest.raises(UserError, match=r"column 'entry': a value has no `metadata.source_dataset`.*; use entries"):
        reasoning_gym(["1"], ["p"], entry=[entry])


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0.0), (6, 0.0), (7, -0.25), (9, -0.75), (10, -1.0), (11, -1.0), (500, -1.0)]
)
def test_overlong_is_the_soft_penalty_of_dapo(tokens, expected):
    assert overlong(["text"], ["p"], max=10, buffer=4, completion_ids=[[1] * tokens]) == [expected]


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Because of this the answer is (C).", "C"),
        ("**Answer: D**", "D"),
        ("(A) is wrong. **Answer**: D", "D"),
        ("(A) is wrong. Answer: \\(D\\)", "D"),
        ("The correct answer is option **\\textbf{(D)}**", "D"),
        ("the answer is (A). Wait, the answer is (B).", "A"),  # as MMLU-Pro's filter takes the first
        ("(A) is wrong and (B) is right: (B)", "B"),
        ("so \\boxed{\\text{C}}", "C"),
        ("Reasoning.\n\nC", "C"),
        ("(A) <answer>C</answer>", "C"),
        ("<answer> C. blue</answer>", "C"),
        ("C. blue", None),
        ("The answer is a prime number.", None),
        ("Answer: I think it is (C)", "C"),
        ("Answer: I'm not sure.", None),
        ("The answer is I because", "I"),
    ],
)
def test_a_choice_is_read_as_lm_evaluation_harness_does(text, letter):
    assert chosen_letter(text) == letter
    assert choice([text, f"<think>{text}"], ["p"] * 2, answer=["C", "C"]) == [float(letter == "C"), 0.0]


def test_a_right_choice_is_a_letter():
    assert choice(["The answer is B."] * 4, ["p"] * 4, answer=["b", "(B)", "B.", "(A)"]) == [1.0, 1.0, 1.0, 0.0]
    with pytest.raises(ValueError, match=r"`answer` is 'blue', expected a letter"):
        choice(["B"], ["p"], answer=["blue"])
