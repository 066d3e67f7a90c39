"""The pages of a comparison and of an offline comparison in a real Chromium."""

import json
from pathlib import Path

import pytest
from browsing import assert_fits, assert_silent, opened_page
from comparisons import evaluation, record_of, settings_of, write_model

from qarl.comparison.comparison_page import write_outputs
from qarl.comparison.offline.offline_page import write_page_and_plots
from qarl.comparison.plan import Member
from qarl.comparison.summary import build
from qarl.config import Config

pytestmark = pytest.mark.slow
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e" + "W" * 80


def ten_runs(tmp_path: Path) -> Path:
    """Five schemes by two learners, and a failed member with hostile texts."""
    write_model(tmp_path / "model")
    members, records = [], {}
    for i, scheme in enumerate(("bf16", "w4a16", "w8a8", "fp8", "w4a8")):
        for learner in ("aligned", "full_precision"):
            group = {"group_size": 32} if scheme in ("w4a16", "w4a8") else {"group_size": None}
            quant = {"scheme": scheme, "learner": learner, **group}
            config = Config.model_validate(settings_of(tmp_path / "model", quant=quant))
            name = f"{scheme}-{learner}-seed0"
            members.append(Member(name, scheme, learner, 0, tmp_path / name, config, "finished"))
            mismatch = {"mismatch__delta_abs_mean": 0.01 * (i + 1)}
            records[name] = record_of(config, tmp_path / name, 6, [evaluation(6, 0.1 * i + 0.2)], **mismatch)
    members.append(Member(HOSTILE, "fp8", "aligned", 1, tmp_path / "bad", None, "failed", f"because {HOSTILE}"))
    comparison = build("A comparison", ["qarl", "compare"], members, records)
    write_outputs(tmp_path, comparison, records)
    return tmp_path / "comparison.html"


def offline(tmp_path: Path) -> Path:
    """The recorded comparison of SmolLM2's schemes, with a layer's error each, and a scheme that failed."""
    recorded = Path(__file__).parents[2] / "benchmarks" / "results" / "offline_cpu.json"
    result = json.loads(recorded.read_text())
    for member in result["members"]:
        error = {"kind": "up_proj", "sqnr_db": 30.0, "max_abs": 0.1}
        member["weight_error"] = [
            {"module": f"model.layers.{i}.mlp.up_proj", "layer": i, "relative": 0.01 * (i + 1), **error}
            for i in range(3)
        ]
    result["members"].append({"name": "w4a16", "state": "failed", "reason": HOSTILE})
    result["title"] = HOSTILE
    write_page_and_plots(tmp_path, result)
    return tmp_path / "comparison.html"


@pytest.mark.parametrize("made", [ten_runs, offline])
def test_the_page_is_silent_and_nothing_is_cut_off(made, browser, tmp_path):
    file = made(tmp_path)
    with opened_page(browser, file, 360, "dark") as opened:
        assert_silent(opened, file)
        assert_fits(opened, charts=6)
        assert "alert(1)" in opened.page.locator("body").inner_text()
