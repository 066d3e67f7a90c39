"""What functions are given beside the completions: token ids, and rows whose answer is not there."""

import pytest

from qarl.config.reward import RewardConfig
from qarl.rewards import RewardPool

TAKERS = {
    "by name": "def f(completions, prompts, completion_ids, **columns):\n    ids = completion_ids\n",
    "among the columns": "def f(completions, **columns):\n    ids = columns['completion_ids']\n",
    "with another": "def f(prompts, completions, completion_ids, answer, **columns):\n    ids = completion_ids\n",
}
IDS = [[5], [], [7, 1, 7], [258] * 400]
COMPLETIONS = ["a", "", "one two", "x" * 10]


@pytest.mark.parametrize(("name", "workers"), list(zip(TAKERS, (1, 3, 1), strict=True)))
def test_a_function_sees_the_token_ids_of_its_completions(tmp_path, name, workers):
    (tmp_path / "mine.py").write_text(TAKERS[name] + "    return [-len(i) + sum(i) / 1000 for i in ids]\n")
    config = RewardConfig(functions=[{"name": f"{tmp_path / 'mine.py'}:f"}], workers=workers)
    with RewardPool(config, columns=["answer"]) as rewards:
        result = rewards.score(COMPLETIONS, ["p"] * 4, {"answer": ["1"] * 4}, IDS)
    assert result.total == [-len(ids) + sum(ids) / 1000 for ids in IDS]


def test_length_counts_tokens_and_needs_those_of_every_completion():
    functions = [{"name": "length", "options": {"unit": "tokens", "max": 4}}, {"name": "format", "weight": 0.0}]
    with RewardPool(RewardConfig(functions=functions), columns=["answer"]) as rewards:
        total = rewards.score(COMPLETIONS, ["p"] * 4, {"answer": ["1"] * 4}, IDS).total
        with pytest.raises(ValueError, match="completion_ids has 3 values for 4 completions"):
            rewards.score(COMPLETIONS, ["p"] * 4, {}, IDS[:3])
    assert total == [-0.25, 0.0, -0.75, -1.0]


NO_ANSWER = "the data's column `answer` has no answer in this row"


@pytest.mark.parametrize(("name", "options"), [("exact", {}), ("regex", {"pattern": "(.+)", "group": 1}), ("math", {})])
def test_a_row_without_an_answer_fails_instead_of_scoring_0(name, options):
    config = RewardConfig(functions=[{"name": name, "options": options}])
    with RewardPool(config, columns=["answer"]) as rewards:
        for none in None, float("nan"), {"ground_truth": "5"}:
            result = rewards.score(["5", str(none), "7"], ["p"] * 3, {"answer": ["5", none, "7"]})
            assert (result.total, result.failed) == ([1.0, 0.0, 1.0], {name: 1})
            assert result.messages[-1].startswith(f"reward `{name}`: completion 1 scores 0: ValueError: {NO_ANSWER}")


def test_columns_reach_a_function_with_their_types(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def f(completions, thing, **columns):\n    return [float(repr(t) == c) for c, t in zip(completions, thing)]\n"
    )
    things = [(1, "a"), {2: [None, True], "%": ()}, {"b": 10**40}, [float("inf"), -0.0], "\ud800\0"]
    with RewardPool(RewardConfig(functions=[{"name": f"{tmp_path / 'mine.py'}:f"}]), columns=["thing"]) as rewards:
        result = rewards.score([repr(thing) for thing in things], ["p"] * 5, {"thing": things})
    assert result.total == [1.0] * 5
