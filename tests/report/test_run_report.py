"""The page of a run, for directories in every state."""

import json

import pytest
import yaml
from hand_made_runs import draw_nothing, make_run, step
from typer.testing import CliRunner

from qarl.cli import app
from qarl.errors import UserError
from qarl.report.blocks import Completions, LineChart, Text
from qarl.report.run_report import report_sections, write_report
from qarl.storage.runs import read_run


def sections(path):
    return {section.title: section for section in report_sections(read_run(path))}


def charts(path) -> dict[str, LineChart]:
    found = [block for s in report_sections(read_run(path)) for block in s.blocks if isinstance(block, LineChart)]
    return {chart.title: chart for chart in found}


def warnings(path) -> str:
    blocks = sections(path)["Summary"].blocks
    return "\n".join(block.text for block in blocks if isinstance(block, Text) and block.kind == "warning")


def test_a_finished_run_has_its_page_and_plots_and_nothing_to_warn_of(tmp_path):
    names = ("reward/mean", "reward/std", "mismatch/delta_abs_max")
    run = make_run(tmp_path / "a", [{name: step(i)[name] for name in names} for i in range(1, 5)])
    assert write_report(run) == run / "report.html"
    assert {"reward.png", "log_prob_difference.png"} <= {path.name for path in (run / "plots").iterdir()}
    assert warnings(run) == ""
    text = (run / "report.html").read_text()
    assert "0.1 → 0.4" in text and "some/model" in text
    without = write_report(make_run(tmp_path / "b", [{"sft/loss": 1.0}, {"sft/loss": 0.5}]))
    assert "first quarter" not in without.read_text() and "Reward" not in charts(without.parent)
    assert write_report(run).read_text() == text and not list(run.rglob("*.tmp"))


def test_a_run_without_steps_says_so(tmp_path):
    run = make_run(tmp_path / "a", [])
    assert "has not finished a step" in warnings(run)
    assert charts(run) == {}
    assert write_report(run).exists()


def test_a_stopped_run_with_bad_numbers_says_what_is_wrong(tmp_path):
    rows = [step(1), step(2, **{"policy/grad_norm": None, "reward/failed": 3.0, "policy/skipped_steps": 1.0})]
    run = make_run(tmp_path / "a", rows)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "rew')
    text = warnings(run)
    for part in (
        "stopped after 2 of 4",
        "policy/grad_norm was not finite in 1 of 2 steps (first: step 2)",
        "3 reward scores failed",
        "1 optimizer steps were skipped",
        "metrics.jsonl: omitted",
    ):
        assert part in text
    assert charts(run)["Gradient norm"].series[0].y == [4.0, None]


def test_every_metric_is_drawn_or_listed_and_each_once(tmp_path):
    extra = {"reward/brevity_mean": 0.5, "reward/exact_mean": 0.1, "mine/odd": 7, "eval/avg": 0.2, "text": "words"}
    rows = [step(i, **extra, **{"mine/moving": i}) for i in range(1, 5)]
    run = make_run(tmp_path / "a", rows)
    drawn = charts(run)
    (constant,) = sections(run)["Metrics that never changed"].blocks
    assert [row[0] for row in constant.rows] == ["reward/brevity_mean", "reward/exact_mean", "reward/failed"]
    other = sections(run)["Other metrics"].blocks
    assert [chart.title for chart in other] == ["mine/odd", "eval/avg", "mine/moving"]
    assert [series.name for series in drawn["Step time by phase"].series] == ["whole step", "rollout"]
    assert all(chart.x_label == "step" and chart.y_label for chart in drawn.values())


def test_agreement_bit_for_bit_is_said_in_words(tmp_path):
    zero = {"mismatch/delta_abs_mean": 0.0, "mismatch/delta_abs_max": 0.0, "mismatch/k1": 0.0}
    run = make_run(tmp_path / "a", [step(i, **zero) for i in range(1, 5)])
    (block,) = sections(run)["Mismatch between sampler and learner"].blocks
    assert "agreed bit for bit in all 4 steps" in block.text


def test_samples_are_lowest_median_highest_and_a_bad_line_is_named(tmp_path):
    run = make_run(tmp_path / "a", [step(1)])
    with open(run / "rollouts" / "000001.jsonl", "ab") as file:
        file.write(b'{"step": 1, "reward": null, "completion": 3}\n\xff\xff\n')
    warning, samples = sections(run)["Samples"].blocks
    assert "000001.jsonl: 1 line cannot be read" in warning.text
    assert isinstance(samples, Completions) and [item.reward for item in samples.items] == [0.0, 0.5, 1.0]


def test_evaluations_become_curves_with_intervals_and_a_table(tmp_path):
    run = make_run(tmp_path / "a", [step(1), step(2)])
    score = {"mean": 0.5, "low": 0.4, "high": 0.6}
    lines = []
    for number in (0, 2):
        passes = {"1": score, "4": score | {"mean": 0.55}}
        tasks = [{"name": name, "avg": score, "pass": passes} for name in ("gsm8k", "math")]
        lines.append(json.dumps({"step": number, "tasks": tasks, "overall": {"avg": score, "pass": {"4": score}}}))
    (run / "evaluations.jsonl").write_text("\n".join([*lines, '{"step": 3}\n']))
    avg, pass4, table = sections(run)["Evaluation"].blocks
    assert [series.name for series in avg.series] == ["gsm8k", "math", "overall"]
    assert (avg.series[0].x, avg.series[0].low) == ([0, 2], [0.4, 0.4])
    assert pass4.title == "Evaluation, pass@4"
    assert table.rows[0] == ["2", "gsm8k", "0.50 [0.40, 0.60]", "0.55 [0.40, 0.60]"]


def test_an_out_that_is_something_else_is_refused_and_a_page_is_replaced(tmp_path, monkeypatch):
    run = make_run(tmp_path / "a", [{"reward/mean": 0.1}])
    other = tmp_path / "mine.html"
    other.write_text("mine")
    with pytest.raises(UserError, match=r"--out: .*was not written by qarl"):
        write_report(run, other)
    with pytest.raises(UserError, match=r"--out: .* is a directory"):
        write_report(run, tmp_path)
    assert other.read_text() == "mine" and not (tmp_path / "plots").exists()
    draw_nothing(monkeypatch)
    for _ in range(2):
        assert write_report(run, tmp_path / "new" / "page.html").exists()
    assert not (run / "report.html").exists()


def test_runs_lists_state_step_and_reward_and_names_what_it_cannot_read(tmp_path):
    make_run(tmp_path / "a", [step(1), step(2)])
    make_run(tmp_path / "b", [])
    (make_run(tmp_path / "c", []) / "config.yaml").write_text("train: 3")
    result = CliRunner().invoke(app, ["runs", str(tmp_path)])
    assert result.exit_code == 0
    listed = [line.split()[:3] for line in result.stdout.splitlines() if "/4" in line]
    assert listed == [["a", "stopped", "2/4"], ["b", "empty", "0/4"]]
    assert "unreadable" in result.stderr and "config.yaml" in result.stderr
    listed = json.loads(CliRunner().invoke(app, ["runs", str(tmp_path), "--json"]).stdout)
    assert [row["reward"] for row in listed["runs"]] == [0.2, None] and len(listed["problems"]) == 1
    assert [row["kv_cache_dtype"] for row in listed["runs"]] == ["auto", "auto"]


def test_an_fp8_kv_cache_is_named_in_the_list_and_on_the_page(tmp_path, monkeypatch):
    draw_nothing(monkeypatch)
    run = make_run(tmp_path / "a", [step(1), step(2)])
    values = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(values | {"quant": {"scheme": "w8a8", "kv_cache_dtype": "fp8"}}))
    assert "w8a8, FP8 KV" in CliRunner().invoke(app, ["runs", str(tmp_path)]).stdout
    page = write_report(run).read_text()
    assert "w8a8, FP8 KV cache, aligned learner" in page and "<dt>KV cache</dt><dd>FP8</dd>" in page


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("extra/{}", lambda step, i: step * i % 7, "a section has at most 60 charts: extra/60 and 4,939 more."),
        ("reward/f{}_mean", lambda step, i: step * i % 7, "The first 30 of 5,000 curves."),
        ("extra/{}", lambda step, i: None, "4,990 more metrics were not finite in some steps."),
    ],
)
def test_thousands_of_metrics_are_bounded_work_and_the_page_says_what_it_leaves_out(
    tmp_path, monkeypatch, name, value, said
):
    metrics = [{name.format(i): value(step, i) for i in range(5000)} for step in range(1, 5)]
    drawn = draw_nothing(monkeypatch)
    page = write_report(make_run(tmp_path / "run", metrics))
    assert said in page.read_text() and page.stat().st_size < 400_000
    assert len({id(chart) for chart in drawn}) < 80 and len(list(tmp_path.rglob("*.png"))) < 80
