from pathlib import Path

import pytest

from qarl.config.reward import RewardConfig
from qarl.errors import UserError
from qarl.rewards.fingerprint import reward_fingerprint

# file -> content; `judges/mine.py:f` imports the first ones, in every way there is, and not the last ones
USED = {
    "judges/mine.py": "import near\nfrom package import part\nfrom package.inner import deep as d\ndef f(): pass\n",
    "judges/near.py": "def later():\n    import nearer\n",
    "judges/nearer.py": "import near  # a circle\nimport torch, nowhere\n",
    "judges/package/__init__.py": "from . import sibling\n",
    "judges/package/part.py": "x = 1\n",
    "judges/package/sibling.py": "from .inner.deep import *\n",
    "judges/package/inner/__init__.py": "",
    "judges/package/inner/deep.py": "from ..cousin import y\n",
    "judges/package/cousin.py": "from ... import beyond\n",
}
UNUSED = {"judges/other.py": "", "judges/package/unused.py": "", "judges/data.txt": "", "near.py": ""}


@pytest.fixture(autouse=True)
def sources(tmp_path, monkeypatch) -> Path:
    for name, text in {**USED, **UNUSED}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def of(name: str, **options) -> str:
    (digest,) = reward_fingerprint(RewardConfig(functions=[{"name": name, "options": options}]).functions).values()
    return digest


def test_an_edit_of_what_is_imported_is_another_reward_and_of_nothing_else(sources):
    seen = {of("judges/mine.py:f")}
    for name in USED:
        path = sources / name
        before = of("judges/mine.py:f")
        text = path.read_bytes()
        path.write_bytes(text + b"#")
        assert of("judges/mine.py:f") != before, name
        seen.add(of("judges/mine.py:f"))
        path.write_bytes(text)
        assert of("judges/mine.py:f") == before
    assert len(seen) == len(USED) + 1
    for name in UNUSED:
        (sources / name).write_text("changed = True\n")
    assert of("judges/mine.py:f") in seen


def test_the_function_and_its_options_count_and_the_place_does_not(sources):
    digest = of("judges/mine.py:f")
    assert len({digest, of("judges/mine.py:g"), of("judges/mine.py:f", scale=2), of("judges/near.py:f")}) == 4
    (sources / "judges").rename(sources / "moved")
    assert of("moved/mine.py:f") == of(f"{sources}/moved/../moved/mine.py:f") == digest


def test_built_ins_are_their_names_and_options():
    assert of("exact") == of("exact") != of("exact", casefold=True)
    assert of("length") != of("exact")


def test_labels_are_those_of_the_results_and_a_weight_does_not_count():
    functions = [{"name": "exact"}, {"name": "exact", "weight": 2.0}, {"name": "judges/mine.py:f"}]
    found = reward_fingerprint(RewardConfig(functions=functions).functions)
    assert list(found) == ["exact", "exact#2", "f"] and found["exact"] == found["exact#2"]


@pytest.mark.parametrize("text", ["def f(:\n", "\0"])
def test_a_source_that_does_not_parse_still_counts(sources, text):
    (sources / "judges/mine.py").write_text(text)
    digest = of("judges/mine.py:f")
    (sources / "judges/mine.py").write_text(text + " ")
    assert of("judges/mine.py:f") != digest


@pytest.mark.parametrize("name", ["judges/absent.py:f", "~nosuchuser/x.py:f"])
def test_a_source_that_cannot_be_read_is_one_line(name):
    with pytest.raises(UserError, match=r"reward\.functions: `") as caught:
        of(name)
    assert "\n" not in str(caught.value)
