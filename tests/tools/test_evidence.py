"""`tools/evidence.py` on run directories with known numbers: records, tables and the pages."""

import json
from pathlib import Path
from types import SimpleNamespace
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
        rows = []
        for i, task in enumerate(TASKS):
            row = {"task": "test", "prompt_id": i, "prompt": f"<user>{task['prompt']}<assistant>"}
            row |= {"correct": step > 0 and i < right, "finish_reason": "length" if i == 0 else "stop"}
            rows += [row | {"sample": sample} for sample in range(2)]
        write_lines(path / f"evaluations/{step:06d}.jsonl", rows)


@pytest.fixture(scope="module")
def root(tmp_path_factory, tiny_model) -> Path:
    """Records of three seeds of one arm and of two rates of another, a stopped run, and pages."""
    root, model = tmp_path_factory.mktemp("evidence"), tiny_model()
    for seed, right in enumerate((6, 4, 2)):
        write_run(root / f"runs/good-seed{seed}", model, seed, 1e-5, right, 0.8)
    write_run(root / "runs/poor", model, 0, 1e-5, 0, 0.1)
    write_run(root / "faster/poor", model, 0, 3e-5, 2, 0.4)
    write_run(root / "faster/good-seed0", model, 0, 3e-5, 8, 0.2, steps=3)
    for page in ("docs/results.md", "benchmarks/reproductions.md"):
        (root / page).parent.mkdir()
        (root / page).write_text(f"Before.\n{evidence.BEGIN}\nold\n{evidence.END}\nAfter.\n")
    run(root, "record", root / "runs", root / "faster")
    return root


def run(root: Path, *arguments: object) -> None:
    options = evidence.parse(["--root", str(root), *map(str, arguments)])
    options.action(options)


def test_records_and_figures(root):
    names = sorted(path.name for path in (root / evidence.RECORDS).iterdir())
    made = json.loads((root / evidence.RECORDS / names[1]).read_text())
    size = f"{STEPS}x{made['responses']}"
    runs = ["good-{}-lr1e-05-seed0", "good-{}-lr1e-05-seed1", "good-{}-lr1e-05-seed2", "poor-{}-lr1e-05-seed0"]
    assert names == [f"{name}.json".format(size) for name in (*runs, "poor-{}-lr3e-05-seed0")]
    assert made["evaluations"][0]["correct"] == [0] * 8 and made["evaluations"][1]["correct"] == [2] * 4 + [0] * 4
    assert made["families"] == ["sums", "words"] * 4 and made["evaluations"][1]["truncated_frac"] == 0.125
    assert made["curves"]["reward/mean"][-1] == 0.8 and "host" not in made["environment"]
    assert made["config"]["quant"]["scheme"] == "w4a16" and "policy/entropy" not in made["curves"]

    for _ in range(2):  # the second time replaces what the first one wrote
        run(root, "figures", "--reference", "good", "--size", size, size)
    page, further = ((root / name).read_text() for name in ("docs/results.md", "benchmarks/reproductions.md"))
    pictures = {path.name for path in (root / "docs/images").iterdir()}
    assert pictures == {f"evidence_{name}.png" for name in ("accuracy", "final", "reward", "mismatch", "errors")}
    assert all(f"](images/{name})" in page for name in pictures)
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    # Three seeds: 25, 50 and 75 %, whose t interval is wider than [0, 1].
    assert "| good | 1e-05 | 0, 1, 2 | 0.0 [0.0, 32.4] | 50.0 [0.0, 100.0] | 50.0 [0.0, 100.0] |  |  |" in rows
    wilson = evidence.accuracy([json.loads((root / evidence.RECORDS / names[4]).read_text())], evidence.FINAL)
    assert wilson[0] == 0.25 and 0.05 < wilson[1] < 0.1 and 0.5 < wilson[2] < 0.65
    assert "| -50.0 [" in next(row for row in rows if row.startswith("| poor | 3e-05 | 0 |"))
    assert "| good | 1e-05 | 50.0 | 50.0 |" in further  # by family
    assert "| good | 1e-05 | 0, 1, 2 | 0.0 [0.0, 32.4] | 50.0 [0.0, 100.0] |" in further  # of the further size
    assert "A GPU; torch 2.0; revision abcdef01" in page
    for text in (page, further):
        assert text.startswith("Before.\n") and text.endswith("After.\n") and "\nold\n" not in text


def test_arms_and_seeds_without_a_record_are_listed(root, capsys, monkeypatch):
    study = SimpleNamespace(variants=["good", "poor", "never"], config={"optim": {"lr": 1e-5}})
    monkeypatch.setattr(evidence, "load_study", lambda path: study)
    run(root, "missing", "--seeds", 0, 1, 3)
    listed = capsys.readouterr().out.splitlines()
    assert (
        "good                  lr 1e-05  seeds 3" in listed and "poor                  lr 3e-05  seeds 1, 3" in listed
    )
    assert "never                 lr 1e-05  seeds 0, 1, 3" in listed


def test_the_first_steps_of_a_stopped_run_make_a_record(tmp_path, tiny_model):
    write_run(tmp_path / "runs/good", tiny_model(), 0, 1e-5, 2, 0.8, steps=5)
    run(tmp_path, "record", tmp_path / "runs", "--steps", 4)
    [path] = (tmp_path / evidence.RECORDS).iterdir()
    made = json.loads(path.read_text())
    assert path.name.startswith("good-4x") and made["steps"] == len(made["curves"]["reward/mean"]) == 4
    assert [evaluation["step"] for evaluation in made["evaluations"]] == [0, 4]
    with pytest.raises(UserError, match="no evaluation after step 5; choose one of 0, 4"):
        run(tmp_path, "record", tmp_path / "runs", "--steps", 5)


def test_curves_average_over_seeds_and_arms_are_compared_on_the_seeds_that_both_have(root):
    groups = evidence.grouped(evidence.read_records(root / evidence.RECORDS), ["poor", "good"])
    assert list(evidence.labelled(groups)) == ["poor, lr 1e-05", "poor, lr 3e-05", "good"]
    reward = evidence.charts(evidence.labelled(groups))["reward"].series[1]
    assert reward.y[:2] == [pytest.approx(0.05), pytest.approx(0.075)]  # of one and of two steps, 0.05 more each
    good, poor = groups["good", 1e-5], groups["poor", 3e-5]
    # On seed 0 alone, which both have: better in 4 of 8 prompts.
    gap, low, high = evidence.difference(good, poor, evidence.FINAL)
    assert gap == pytest.approx(0.5) and 0 < low < gap < high
    assert evidence.difference(good[1:], poor, evidence.FINAL) is None
    # Three seeds at +75, +50 and +25 points: Student's t, 50 +- 4.303 * 25 / sqrt(3), is wider than the bootstrap.
    nothing = [record | {"evaluations": record["evaluations"][:1]} for record in good]
    assert evidence.difference(good, nothing, evidence.FINAL) == pytest.approx((0.5, -0.1211, 1.1211), abs=1e-3)
    # 75 % at the end and 0 % after 5 of 8 steps; step 4 is no part of the second half.
    start, end = good[0]["evaluations"]
    found = [start, end | {"step": 4}, start | {"step": 5}, end]
    assert "| 75.0 [40.9, 92.9] | 37.5 [" in evidence.results(
        {("good", 1e-5): [good[0] | {"evaluations": found}]}, None
    )


def test_the_ladder_shows_right_answers_by_family_and_level(root, capsys):
    run(root, "ladder", root / "runs/good-seed1")
    found = capsys.readouterr().out
    assert "evaluations/000008.jsonl, task test" in found
    assert "sums            level 3  100% right of 4, 50% truncated" in found
    assert "sums            level 4    0% right of 4, 0% truncated" in found
    write_lines(root / "test.jsonl", TASKS[::-1])
    try:
        with pytest.raises(UserError, match=r"000000.jsonl: prompt 0 changed since; restore the data file"):
            run(root, "ladder", root / "runs/good-seed1")
    finally:
        write_lines(root / "test.jsonl", TASKS)


def test_records_are_chosen_by_size(tmp_path):
    made = [{"arm": arm, "steps": steps, "responses": 16} for arm, steps in (("a", 4), ("a", 8), ("a+other", 8))]
    for index, record in enumerate(made):
        (tmp_path / f"{index}.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="records of several sizes; choose one with --size: 4x16, 8x16"):
        evidence.read_records(tmp_path)
    assert evidence.read_records(tmp_path, "8x16") == [made[1]]


def test_every_arm_plans_with_the_reward_of_the_traces(smollm2, tmp_path):
    write_lines(tmp_path / "tasks.jsonl", TASKS)
    sources = [f"{key}.source={tmp_path / 'tasks.jsonl'}" for key in ("data", "evaluation.tasks.0.data")]
    found = load_study(str(evidence.STUDY))
    own = {name: arm for name, arm in found.variants.items() if "path" not in arm.get("model", {})}  # the policy's
    found = found.model_copy(update={"variants": own})
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
