"""tools/same_bits.py without its runs: the cases are valid configurations, and every kind of difference is reported."""

import shlex
from pathlib import Path

import pytest
import same_bits
import yaml
from same_bits import CASES, Case
from tiny_models import tiny_settings

from qarl.config import load_config

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_cases_are_valid_configurations(case: Case, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tiny_settings(tmp_path)))
    load_config(str(ROOT / case.model if case.model.endswith(".yaml") else config), shlex.split(case.overrides))


@pytest.mark.parametrize(
    ("after", "line"),
    [
        ({"loss": "1.0", "x": "2"}, "equal      a"),
        ({"loss": "1.5", "x": "3"}, "DIFFERENT  a: loss: 1.0 -> 1.5, and 1 more of 2"),
        ({"error": "Traceback"}, "FAILED     a\nafter: Traceback"),
    ],
)
def test_the_first_difference_is_reported(after: same_bits.Digests, line: str, capsys: pytest.CaptureFixture) -> None:
    equal = same_bits.compare("a", {"loss": "1.0", "x": "2"}, after)
    assert capsys.readouterr().out.startswith(line) and equal == line.startswith("equal")
