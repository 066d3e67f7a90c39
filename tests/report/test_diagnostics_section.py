"""Plots of a step's tokens on the page of a run."""

import math

import pytest
from hand_made_runs import add_diagnostics, diagnostics, draw_nothing, make_run, step

from qarl.report.blocks import Excerpts, Histogram, LineChart, Scatter, Section, Text
from qarl.report.diagnostics import diagnostics_section, record_blocks
from qarl.report.run_report import report_sections, write_report
from qarl.storage.runs import read_run


def charts(section: Section) -> dict[str, LineChart | Scatter | Histogram]:
    return {b.title: b for b in section.blocks if isinstance(b, LineChart | Scatter | Histogram)}


def section_of(run) -> Section:
    return {section.title: section for section in report_sections(read_run(run))}["Diagnostics"]


def test_a_run_without_records_has_no_such_section(tmp_path):
    run = make_run(tmp_path / "a", [step(1)])
    assert section_of(run).blocks == [] and section_of(run).intro == ""  # which a page leaves out


def test_the_last_step_is_plotted_with_earlier_deciles_beside_it(tmp_path, monkeypatch):
    draw_nothing(monkeypatch)
    run = make_run(tmp_path / "a", [{"reward/mean": 0.1}])
    add_diagnostics(run, *(diagnostics(i) for i in (2, 4, 6, 8, 10)))
    section = section_of(run)
    assert section.intro == "Step 10: its 4 tokens."
    found = charts(section)
    assert list(found) == [
        "Log-probs of sampler and learner",
        "Log-prob difference by probability",
        "Ratio of the objective",
        "Policy change and precision gap per token",
        "Correction weights",
        "Published values changed, by layer",
        "Log-prob difference by probability, over steps",
    ]
    over = found["Log-prob difference by probability, over steps"]
    assert [series.name for series in over.series] == ["step 2", "step 4", "step 8", "step 10"]
    assert over.series[-1].y == [0.1] * 10
    plots = {path.name for path in (write_report(run).parent / "plots").iterdir()}
    assert {"ratio_of_the_objective.png", "correction_weights.png"} <= plots


def scatters(record) -> dict[str, Scatter]:
    return {block.title: block for block in record_blocks(record) if isinstance(block, Scatter)}


def lines(**changes) -> dict[str, LineChart]:
    return {block.title: block for block in record_blocks(diagnostics(1, **changes)) if isinstance(block, LineChart)}


def test_points_are_classed_by_clipping_and_by_the_sign_of_the_advantage():
    ratio = scatters(diagnostics(1))["Ratio of the objective"]
    assert [(points.name, len(points.x)) for points in ratio.points] == [
        ("inside the band", 2),
        ("clipped", 1),
        ("clipped by precision alone", 1),
    ]
    assert ratio.points[0].x == pytest.approx([-0.8, -1.3])  # of the last two tokens
    assert ratio.band == (0.8, 1.2) and ratio.points[2].y == [pytest.approx(math.exp(0.3))]
    scatter = record_blocks(diagnostics(1))[0]
    assert [(points.name, len(points.x)) for points in scatter.points] == [("A > 0", 1), ("A < 0", 2), ("A = 0", 1)]
    precision = scatters(diagnostics(1))["Policy change and precision gap per token"]
    assert precision.points[0].x == [pytest.approx(0.1)] and precision.points[0].y == [pytest.approx(0.2)]


def test_without_shadow_weights_layers_or_band_those_plots_are_left_out_and_the_rest_says_so():
    record = diagnostics(1, layers=None, band=None, error_examples=[])
    record["tokens"] |= {"logp_shadow": None, "weight": None, "outside": None, "phantom": None}
    found = {b.title: b for b in record_blocks(record) if isinstance(b, Scatter | Histogram | LineChart)}
    assert list(found) == [
        "Log-probs of sampler and learner",
        "Log-prob difference by probability",
        "Ratio of the objective",
    ]
    assert found["Ratio of the objective"].note == "This objective never clips."
    assert [points.name for points in found["Ratio of the objective"].points] == ["ratio"]


def test_layers_are_curves_by_kind_and_examples_have_their_context():
    up, down = lines()["Published values changed, by layer"].series
    assert (up.name, up.x, up.y) == ("up_proj", [0, 1, 2], [0.1, 0.2, 0.3]) and down.name == "down_proj"
    (excerpts,) = [block for block in record_blocks(diagnostics(1)) if isinstance(block, Excerpts)]
    (item,) = excerpts.items
    assert (item.before, item.marked, item.after) == ("It is ", "so so so", " good")
    assert item.details == "repetitive · tokens 2 to 26 of a response · advantage -1"


@pytest.mark.parametrize("damage", ["{", '{"format_version": 9}', '{"format_version": 1, "tokens": {}}'])
def test_a_file_that_is_no_record_is_named_and_the_others_are_shown(tmp_path, damage):
    run = make_run(tmp_path / "a", [step(1)])
    add_diagnostics(run, diagnostics(1))
    (run / "diagnostics" / "000002.json").write_text(damage)
    section = diagnostics_section(run)
    assert section.blocks[0] == Text("diagnostics/000002.json: cannot be read and is omitted.", "warning")
    assert len(charts(section)) == 6


def test_fp8_errors_and_routers_are_plotted_by_layer():
    def found(**changes) -> LineChart | None:
        return lines(**changes).get("Gradient of an FP8 backward, by layer")

    names = [f"model.layers.{i}.mlp.{kind}_proj" for i in range(3) for kind in ("up", "down")]
    chart = found(backward={"worst": names[4], "layers": {name: [0.999, 0.04] for name in names}})
    assert [(s.name, s.x, s.y) for s in chart.series] == [(k, [0, 1, 2], [0.04] * 3) for k in ("up_proj", "down_proj")]
    assert chart.note == "Worst: model.layers.2.mlp.up_proj (cosine 0.999, error 0.04)."
    chart = found(backward={"worst": names[0], "layers": {names[0]: [None, None]}})
    assert chart.series[0].y == [None] and chart.note == "Worst: model.layers.0.mlp.up_proj (not finite)."
    assert found(backward=None) is found() is None  # earlier records say nothing of it
    routing = {"load_max": [1.5, 2.0], "load_min": [0.5, 0.0], "entropy": [1.2, None]}
    charts = lines(routing=routing)
    loads = charts["Expert load, by layer"].series
    assert [(s.name, s.x, s.y) for s in loads] == [("largest", [0, 1], [1.5, 2.0]), ("least", [0, 1], [0.5, 0.0])]
    assert charts["Router entropy, by layer"].series[0].y == [1.2, None]
    title = "Experts that differ from the sampler's, by layer"
    assert title not in charts
    assert lines(routing=routing | {"disagreement": [0.0, 0.25]})[title].series[0].y == [0.0, 0.25]
    assert "Expert load, by layer" not in lines(routing=None)
