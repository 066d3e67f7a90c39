"""`tools/evidence.py` on run directories with known numbers: records, missing runs, tables and the page."""

import json
from pathlib import Path
from typing import Any

import evidence
import pytest
from make_traces import PATTERN
from tiny_runs import settings

from qarl.comparison.study import load_study, plan_study
from qarl.config.load import load_config, make_config
from qarl.errors import UserError

STEPS = 8
TASKS = [
    {"prompt": f"What is {i} + {i}?", "answer": str(2 * i), "family": ("sums", "words")[i % 2], "level": 3 + i // 4}
    for i in range(8)
]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(path: Path, model: Path, seed: int, lr: float, right: int, reward: float, steps: int = STEPS) -> None:
    """A run with `steps` of its STEPS steps. right: prompts answered at the end; none is before training."""
    tasks = path.parent.parent / "test.jsonl"
    write_lines(tasks, TASKS)
    task = {"name": "test", "data": {"source": str(tasks)}, "reward": [{"name": "exact"}]}
    train = {"steps": STEPS, "seed": seed, "run_dir": str(path), "prompts_per_step": 4}
    given = settings(model, train=train, optim={"lr": lr}, evaluation={"samples": 2, "tasks": [task]})
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(make_config(given, "test").to_yaml())
    found = {"gpus": ["A GPU"], "packages": {"torch": "2.0"}, "git_revision": "abcdef0123", "host": "secret"}
    (path / "environment.json").write_text(json.dumps(found))
    metrics = {"mismatch/delta_abs_mean": 0.25, "error_tokens/frac": 0.5, "time/step_s": 6.0}
    rows = [{"step": i, "reward/mean": reward * i / STEPS, **metrics} for i in range(1, steps + 1)]
    write_lines(path / "metrics.jsonl", rows)
    evaluations = sorted({0, steps // 4 * 4})
    write_lines(path / "evaluations.jsonl", [{"step": step} for step in evaluations])
    for step in evaluations:
        rows = [
            {
                "task": "test",
                "prompt_id": i,
                "sample": sample,
                "prompt": f"<user>{task['prompt']}<assistant>",
                "correct": step > 0 and i < right,
                "finish_reason": "length" if i == 0 else "stop",
            }
            for i, task in enumerate(TASKS)
            for sample in range(2)
        ]
        write_lines(path / f"evaluations/{step:06d}.jsonl", rows)


@pytest.fixture(scope="module")
def study(tmp_path_factory, tiny_model) -> Path:
    """Three seeds of one arm, two rates of another, a stopped run, and the arms' names."""
    root, model = tmp_path_factory.mktemp("evidence"), tiny_model()
    for seed, right in enumerate((6, 4, 2)):
        write_run(root / f"runs/good-seed{seed}", model, seed, 1e-5, right, 0.8)
    write_run(root / "runs/poor", model, 0, 1e-5, 0, 0.1)
    write_run(root / "faster/poor", model, 0, 3e-5, 2, 0.4)
    write_run(root / "faster/good-seed0", model, 0, 3e-5, 8, 0.2, steps=3)
    (root / "arms.yaml").write_text("title: t\nconfig: {}\nvariants: {poor: {}, good: {}, never: {}}\n")
    return root


def run(study: Path, command: str, *arguments: object) -> None:
    given = [command, *arguments, "--records", study / "records", "--study", study / "arms.yaml"]
    options = evidence.parse([str(argument) for argument in given])
    options.action(options)


def test_records_figures_and_what_is_missing(study, capsys):
    run(study, "record", study / "runs", study / "faster")
    assert "faster/good-seed0: stopped at step 3 of 8; no record" in capsys.readouterr().out
    names = sorted(path.name for path in (study / "records").iterdir())
    responses = json.loads((study / "records" / names[0]).read_text())["responses"]
    size = f"{STEPS}x{responses}"
    expected = [
        ("good", "1e-05", 0),
        ("good", "1e-05", 1),
        ("good", "1e-05", 2),
        ("poor", "1e-05", 0),
        ("poor", "3e-05", 0),
    ]
    assert names == [f"{arm}-{size}-lr{lr}-seed{seed}.json" for arm, lr, seed in expected]
    made = json.loads((study / "records" / names[1]).read_text())
    assert made["evaluations"][0]["correct"] == [0] * 8 and made["evaluations"][1]["correct"] == [2] * 4 + [0] * 4
    assert made["families"] == ["sums", "words"] * 4 and made["evaluations"][1]["truncated_frac"] == 0.125
    assert made["curves"]["reward/mean"][-1] == 0.8 and "host" not in made["environment"]
    assert made["config"]["quant"]["scheme"] == "w4a16" and "policy/entropy" not in made["curves"]

    run(study, "missing", study / "runs", study / "faster", "--seeds", 0, 1)
    listed = capsys.readouterr().out.splitlines()
    assert listed[-1] == "8 of 12 have no record"
    assert "good                  lr 3e-05  seed 0  stopped, step 3 of 8" in listed
    assert "never                 lr 1e-05  seed 1  not started" in listed

    docs, further = study / "docs", study / "further.md"
    run(study, "figures", "--docs", docs, "--further", further, "--reference", "good")
    page = (docs / "results.md").read_text()
    pictures = {path.name for path in (docs / "images").iterdir()}
    assert pictures == {f"evidence_{name}.png" for name in ("accuracy", "final", "reward", "mismatch", "errors")}
    assert all(f"](images/{name})" in page for name in pictures)
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    # Three seeds: 25, 50 and 75 %, whose t interval is wider than [0, 1].
    assert "| good | 1e-05 | 0, 1, 2 | 0.0 [0.0, 32.4] | 50.0 [0.0, 100.0] |  |" in rows
    wilson = evidence.accuracy([json.loads((study / "records" / names[4]).read_text())], -1)
    assert wilson[0] == 0.25 and 0.05 < wilson[1] < 0.1 and 0.5 < wilson[2] < 0.65
    poor = next(row for row in rows if row.startswith("| poor | 3e-05 | 0 |"))
    assert "| -50.0 [" in poor and rows.index(poor) < rows.index(next(r for r in rows if r.startswith("| good")))
    assert "| good | 1e-05 | 50.0 | 50.0 |" in further.read_text()  # by family
    assert "A GPU; torch 2.0; revision abcdef01" in page

    page = docs / "results.md"
    page.write_text(page.read_text().replace("# Results", "# Results\n\nOur words."))
    run(study, "figures", "--docs", docs, "--further", further)
    assert page.read_text().count(evidence.BEGIN) == page.read_text().count(evidence.END) == 1
    assert page.read_text().startswith("# Results\n\nOur words.\n")

    further.write_text("No block.\n")
    with pytest.raises(UserError, match=r"further.md: has no line <!-- made"):
        run(study, "figures", "--docs", docs, "--size", size, size, "--further", further)
    further.write_text(f"Before.\n{evidence.BEGIN}\nold\n{evidence.END}\nAfter.\n")
    run(study, "figures", "--docs", docs, "--size", size, size, "--further", further)
    text = further.read_text()
    assert text.startswith("Before.\n") and text.endswith("After.\n") and "old" not in text
    assert "| good | 1e-05 | 0, 1, 2 | 0.0 [0.0, 32.4] | 50.0 [0.0, 100.0] |" in text


def test_the_first_steps_of_a_stopped_run_make_a_record(tmp_path, tiny_model):
    write_run(tmp_path / "runs/good", tiny_model(), 0, 1e-5, 2, 0.8, steps=5)
    arguments = [tmp_path / "runs", "--records", tmp_path / "records", "--steps"]
    evidence.write_records(evidence.parse([str(part) for part in ("record", *arguments, 4)]))
    [path] = (tmp_path / "records").iterdir()
    made = json.loads(path.read_text())
    assert path.name.startswith("good-4x") and made["steps"] == len(made["curves"]["reward/mean"]) == 4
    assert [evaluation["step"] for evaluation in made["evaluations"]] == [0, 4]
    with pytest.raises(UserError, match="no evaluation after step 5; choose one of 0, 4"):
        evidence.write_records(evidence.parse([str(part) for part in ("record", *arguments, 5)]))


def test_a_curve_has_the_best_rate_by_training_reward(study):
    run(study, "record", study / "runs", study / "faster")
    _, best = evidence.grouped(evidence.read_records(study / "records"), ["poor", "good"])
    assert list(best) == ["poor", "good"] and best["poor"][0]["lr"] == 3e-5 and len(best["good"]) == 3
    reward = evidence.charts(best)["reward"].series[0]
    assert reward.y[:2] == [pytest.approx(0.05), pytest.approx(0.075)]  # of one and of two steps, 0.05 more each
    # On seed 0 alone, which both have: better in 4 of 8 prompts.
    gap, low, high = evidence.difference(best["good"], best["poor"])
    assert gap == pytest.approx(0.5) and 0 < low < gap < high
    assert evidence.difference(best["good"][1:], best["poor"]) is None
    # Three seeds at +75, +50 and +25 points: Student's t, 50 +- 4.303 * 25 / sqrt(3), is wider than the bootstrap.
    nothing = [record | {"evaluations": record["evaluations"][:1]} for record in best["good"]]
    assert evidence.difference(best["good"], nothing) == pytest.approx((0.5, -0.1211, 1.1211), abs=1e-3)


def test_the_ladder_shows_right_answers_by_family_and_level(study, capsys):
    run(study, "ladder", study / "runs/good-seed1")
    found = capsys.readouterr().out
    assert "evaluations/000008.jsonl, task test" in found
    assert "| sums | 100% of 4 | 0% of 4 | 50% of 8 | 25% |" in found
    write_lines(study / "test.jsonl", TASKS[::-1])
    try:
        changed = r"000000.jsonl: prompt 0 is another one now; restore the file of the tasks"
        with pytest.raises(Exception, match=changed):
            run(study, "ladder", study / "runs/good-seed1")
    finally:
        write_lines(study / "test.jsonl", TASKS)


def test_records_are_chosen_by_size_and_tag(tmp_path):
    made = [{"arm": arm, "steps": steps, "responses": 16} for arm, steps in (("a", 4), ("a", 8), ("a+other", 8))]
    for index, record in enumerate(made):
        (tmp_path / f"{index}.json").write_text(json.dumps(record))
    with pytest.raises(Exception, match="records of several sizes; choose one with --size: 4x16, 8x16"):
        evidence.read_records(tmp_path)
    assert evidence.read_records(tmp_path, "8x16") == [made[1]]
    assert evidence.read_records(tmp_path, tag="other") == [made[2]]


def test_every_arm_plans_with_the_reward_of_the_traces(smollm2, tmp_path):
    write_lines(tmp_path / "tasks.jsonl", TASKS)
    sources = [f"{key}.source={tmp_path / 'tasks.jsonl'}" for key in ("data", "evaluation.tasks.0.data")]
    found = load_study(str(evidence.STUDY))
    for profile, size in ((None, (200, 512)), ("short", (60, 256))):
        members = plan_study(found, "arms", [f"model.path={smollm2}", *sources], Path("out"), profile, seeds=[0, 1])
        assert len(members) == 2 * len(found.variants)
        assert {(m.config.train.steps, m.config.responses_per_step) for m in members if m.config} == {size}
        assert all(m.config.reward.functions[0].options["pattern"] == PATTERN for m in members if m.config)
    regimes = {m.group: (m.scheme, m.learner) for m in members}
    assert list(regimes)[:4] == ["bf16-grpo-tis", "rollout-tbpo", "qarl-tbpo", "qat-tbpo"]
    learners = ("aligned", "full_precision", "aligned", "fake_quant")
    assert list(regimes.values())[:4] == list(zip(("bf16", "w4a16", "w4a16", "w4a16"), learners, strict=True))
    teaching = load_config(evidence.STUDY.with_name("sft.yaml"))
    assert teaching.evaluation.tasks[0].reward[0].options == {"pattern": PATTERN, "group": 1}
