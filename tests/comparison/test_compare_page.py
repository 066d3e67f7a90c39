"""The table, comparison.json and the page of a comparison of made-up runs."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from comparisons import evaluation, record_of, settings_of, write_model
from rich.console import Console

from qarl.comparison.compare import compare_runs, unique_names
from qarl.comparison.comparison_page import build_sections, write_outputs
from qarl.comparison.plan import Member
from qarl.comparison.summary import NUMBERS, build, cell, print_results
from qarl.config import Config
from qarl.errors import UserError
from qarl.report.blocks import LineChart, Text
from qarl.storage.disk import write_json

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config.model_validate(settings_of(write_model(tmp_path / "model")))


def compared(members: list[Member], records: dict[str, Any]) -> dict[str, Any]:
    return build("A comparison", ["qarl", "compare"], members, records)


@pytest.fixture
def three(config, tmp_path):
    """Two seeds, evaluated, one of them with a mismatch, and a member that failed in a hostile manner."""
    seed1 = Config.model_validate(settings_of(tmp_path / "model", train={"seed": 1}))
    members = [
        Member("fine", "w4a16", "aligned", 0, tmp_path / "fine", config, "finished"),
        Member("other", "w4a16", "aligned", 1, tmp_path / "other", seed1, "finished"),
        Member(HOSTILE, "fp8", "aligned", 0, tmp_path / "bad", None, "failed", f"because {HOSTILE}"),
    ]
    records = {
        "fine": record_of(config, tmp_path / "fine", 4, [evaluation(4, 0.5)]),
        "other": record_of(seed1, tmp_path / "other", 4, [evaluation(4, 0.7)], mismatch__delta_abs_mean=0.0),
    }
    return members, records


def blocks_of(sections, kind):
    return [block for section in sections for block in section.blocks if isinstance(block, kind)]


def test_comparison_json_has_its_fields_and_cells_of_groups_their_units(three, tmp_path):
    write_json(tmp_path / "comparison.json", compared(*three), "--out")
    read = json.loads((tmp_path / "comparison.json").read_text(), parse_constant=pytest.fail)
    assert (read["format_version"], read["kind"], read["title"]) == (1, "runs", "A comparison")
    assert {
        *["name", "state", "reason", "scheme", "learner", "seed", "objective", "run_dir", "steps"],
        *["reward_first_quarter", "reward_last_quarter", "evaluation", "mismatch_delta_abs_mean"],
        *["mismatch_delta_abs_max", "checkpoint_bytes", "memory_peak_gib", "step_s", "rollout_s"],
        *["learner_s", "publish_s"],
    } <= set(read["members"][0])
    assert read["configuration_differences"] == {"train.seed": {"fine": 0, "other": 1}}
    assert read["environment_differences"] == {}  # of host and command, which say nothing about the numbers
    assert read["groups"][0]["evaluation_avg"] == pytest.approx({"mean": 0.6, "low": 0.5, "high": 0.7})
    columns = {column.head: column for column in NUMBERS}
    step = {"mean": 0.5, "low": 0.25, "high": 125.0}
    assert cell({"step_s": step}, columns["step"]) == "500 ms [250 ms, 2 min 05 s]"
    assert cell({"checkpoint_bytes": {"mean": 3 * 2**20}}, columns["checkpoint"]) == "3 MiB"
    reward = {"reward_last_quarter": {"mean": 0.5, "low": 0.4, "high": 0.6}}
    assert cell(reward, columns["reward, last quarter"]) == "0.50 [0.40, 0.60]"


def test_the_page_is_escaped_with_each_chart_as_a_png_and_earlier_ones_removed(three, tmp_path):
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots/earlier.png").write_bytes(b"")
    write_outputs(tmp_path, compared(*three), three[1])
    page = (tmp_path / "comparison.html").read_text()
    assert "<script" not in page and "\x1b" not in page and "\u202e" not in page
    assert page.count("&lt;script&gt;alert(1)") >= 2
    assert all(name in page for name in ("fine", "other", "train.seed"))
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert names == {
        *["reward.png", "mismatch.png", "evaluation.png", "step_time.png", "rollout_time.png"],
        *["learner_time.png", "publish_time.png", "peak_memory.png", "checkpoint_size.png"],
    }
    assert all((tmp_path / "plots" / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_members_that_differ_in_more_than_the_seed_form_no_group(three, tmp_path):
    members, records = three
    changes = {"train": {"seed": 1}, "optim": {"lr": 0.5}}
    members[1].config = Config.model_validate(settings_of(tmp_path / "model", **changes))
    assert compared(members, records)["groups"] == []


def test_seeds_are_one_curve_with_their_extremes_as_its_band(three):
    sections = build_sections(compared(*three), three[1])
    mismatch = next(chart for chart in blocks_of(sections, LineChart) if chart.title == "Mismatch")
    (series,) = mismatch.series
    assert (series.name, list(series.x)) == ("w4a16-aligned", [1, 2, 3, 4])
    assert series.y == pytest.approx([0.005] * 4)
    assert (series.low, series.high) == ([0.0] * 4, [0.01] * 4)


def test_a_mismatch_of_zero_is_stated_in_words(config, tmp_path):
    members = [Member("exact", "w4a16", "aligned", 0, tmp_path, config, "finished")]
    records = {"exact": record_of(config, tmp_path, mismatch__delta_abs_mean=0.0)}
    sections = build_sections(compared(members, records), records)
    assert any("bit for bit" in block.text for block in blocks_of(sections, Text))
    assert [chart.title for chart in blocks_of(sections, LineChart)] == ["Reward"]


def test_the_console_table_shows_every_column_at_a_small_width(three):
    file = io.StringIO()
    print_results(compared(*three), Console(file=file, width=60))
    text = file.getvalue()
    heads = ("quarter", "evaluation", "mismatch", "checkpoint", "peak", "publish", "tokens/s")
    assert all(head in text for head in heads)
    assert max(map(len, text.splitlines()[:8])) <= 60
    assert "\x1b" not in text and "\u202e" not in text


def test_runs_that_cannot_be_compared_are_one_line_and_nothing_is_written(tmp_path, monkeypatch):
    assert unique_names([Path("/x/a/run"), Path("/x/b/run"), Path("/x/b/other")]) == ["a/run", "b/run", "b/other"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    cases = [
        ([], "compare: no runs; give two or more"),
        (["run"], "is the only run"),
        (["run", "run/../run"], "is given twice"),
        (["run", "nothing"], "not a run directory"),
    ]
    for paths, message in cases:
        with pytest.raises(UserError, match=message):
            compare_runs([Path(path) for path in paths], Path("out"))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
