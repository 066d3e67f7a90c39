from collections.abc import Sequence

import pytest

from qarl.config.reward import RewardConfig
from qarl.errors import UserError
from qarl.rewards import RewardPool

GOOD = "def f(completions, prompts, **columns):\n    return [float(len(c)) for c in completions]\n"


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def pool(name: str, columns: Sequence[str] = ("answer",), **options) -> RewardPool:
    return RewardPool(RewardConfig(functions=[{"name": name, "options": options}]), columns)


def write(path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("sub/mine.py:f", {"sub/mine.py": "from neighbour import f\n", "sub/neighbour.py": GOOD}),
        ("my_rewards.lengths:f", {"my_rewards/__init__.py": "", "my_rewards/lengths.py": GOOD}),
    ],
)
def test_function_of_a_file_with_a_neighbour_and_of_a_package(tmp_path, name, files):
    for file, text in files.items():
        write(tmp_path / file, text)
    with pool(name) as rewards:
        assert rewards.score(["abc"], ["p"], {}).total == [3.0]


def test_files_of_one_stem_are_two_modules(tmp_path):
    write(tmp_path / "a" / "mine.py", GOOD)
    write(tmp_path / "b" / "mine.py", GOOD.replace("len(c)", "7"))
    config = RewardConfig(functions=[{"name": "a/mine.py:f"}, {"name": "b/mine.py:f"}])
    with RewardPool(config, []) as rewards:
        assert rewards.score(["abc"], ["p"], {}).by_function == {"f": [3.0], "f#2": [7.0]}


def test_options_reach_the_users_function(tmp_path):
    write(tmp_path / "mine.py", "def f(completions, factor, **columns):\n    return [factor for c in completions]\n")
    with pool("mine.py:f", factor=2.5) as rewards:
        assert rewards.score(["abc"], ["p"], {}).total == [2.5]


def test_column_named_like_a_builtins_option_is_not_taken_for_it():
    with pool("regex", columns=["group", "max", "pattern", "column"], pattern="a") as rewards:
        columns = {name: ["x"] for name in ("group", "max", "pattern", "column")}
        assert rewards.score(["cat"], ["p"], columns).total == [1.0]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("mine.py:g", GOOD, r"`mine.py:g`: there is no `g` in it; its functions: f$"),
        ("mine.py:f", "f = 3\n", r"`f` is int, not a function"),
        ("mine.py:f", "x = 1\ny = x / 0\n", r"does not import: ZeroDivisionError: division by zero \(mine.py:2\)"),
        ("mine.py:f", "def f(texts, /, **columns): pass\n", r"cannot be called: missing a required"),
        ("mine.py:f", "def f(completions, solution, **columns): pass\n", r"'solution'.*data columns: answer"),
        ("mine.py:f", "def f(completions, prompts): pass\n", r"must be f\(completions, prompts, \*\*columns\)"),
        ("elsewhere.py:f", None, r"no file `elsewhere.py` \(working directory"),
        ("no_such_package.rewards:f", None, r"does not import: ModuleNotFoundError: No module named"),
        ("builtins:iter", None, "has no readable signature"),
    ],
)
def test_unloadable_function_is_one_line(tmp_path, name, text, message):
    if text is not None:
        write(tmp_path / "mine.py", text)
    with pytest.raises(UserError, match=message) as caught:
        pool(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "columns", "message"),
    [
        ("regex", {}, ["answer"], r"`regex`: needs the option `pattern`"),
        ("regex", {"patern": "a"}, ["answer"], r"`regex`: unknown option `patern`; it takes pattern, group, column"),
        ("length", {"target": "5"}, [], r"`length`: option `target` is '5', expected float | None"),
        ("code", {"isolation": "none"}, [], r"`code`: option `isolation` is 'none', expected Literal\['namespace', "),
        ("exact", {}, ["question"], r"`exact`: no data column `answer`; available: question"),
    ],
)
def test_builtin_is_checked_when_the_pool_starts(name, options, columns, message):
    with pytest.raises(UserError, match=message):
        pool(name, columns, **options)
