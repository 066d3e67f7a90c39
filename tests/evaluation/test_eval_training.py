"""Evaluations during training: what they leave, and that training does not notice them."""

import json
import shutil
from pathlib import Path

import pytest
from qarl_kernels.logprob import Truncation
from run_faults import repeatable
from tiny_runs import settings

from qarl.config import Config, ModelConfig
from qarl.errors import UserError
from qarl.rollout.engine import SamplingParams
from qarl.training.periodic_evaluation import TrainingEvaluation

pytestmark = pytest.mark.slow

TASKS = [
    {
        "name": "short",
        "data": {"source": "task:arithmetic", "task": {"size": 9, "seed": 7}, "max_prompt_length": 28},
        "reward": [{"name": "regex", "options": {"pattern": "[a-z]"}}],
    },
    {
        "name": "long",
        "data": {"source": "task:arithmetic", "task": {"size": 4, "terms": 5}, "max_prompt_length": 64},
        "reward": [{"name": "length", "options": {"target": 4}}],
    },
]
EVALUATION = {"tasks": TASKS, "every": 2, "samples": 2, "max_response_length": 12, "temperature": 0.7}

# Kills or interrupts the run in its N-th evaluation's second batch.
IN_EVALUATION = """
import os, signal
import qarl.training.periodic_evaluation as training
real, calls = training.evaluate, []
def evaluate(engine, version, tasks, settings, rewards, rows, save, phase, check, ranks):
    calls.append(1)
    def stop(new):
        save(new)
        os.kill(os.getpid(), signal.SIGNAL)
    chosen = stop if len(calls) == N else save
    return real(engine, version, tasks, settings, rewards, rows, chosen, phase, check, ranks)
training.evaluate = evaluate
"""


def in_evaluation(number: int, name: str) -> str:
    return IN_EVALUATION.replace("== N", f"== {number}").replace("SIGNAL)", f"{name})")


def jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def evaluations(run: Path) -> list[dict]:
    return [{k: v for k, v in r.items() if k != "time/eval_s"} for r in jsonl(run / "evaluations.jsonl")]


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


class Evaluated:
    """One configuration: `plain` without evaluations, `reference` with them, and runs of a test's own."""

    def __init__(self, qarl, model: Path, folder: Path) -> None:
        from tiny_runs import write_config

        self.qarl, self.folder = qarl, folder
        data = settings(model, train={"steps": 3}, logging={"tensorboard": False})
        self.plain_config = write_config(folder / "plain.yaml", data)
        self.config = write_config(folder / "c.yaml", {**data, "evaluation": EVALUATION})
        self.plain, self.reference = folder / "plain", folder / "reference"
        assert self.train(self.plain, config=self.plain_config).code == 0
        done = self.train(self.reference)
        assert done.code == 0, done.err
        self.output = done.out

    def train(self, run: Path, *overrides: str, config: Path | None = None, before: str = ""):
        return self.qarl.run("train", config or self.config, f"train.run_dir={run}", *overrides, before=before)


@pytest.fixture(scope="module")
def evaluated(qarl, tiny_model, tmp_path_factory) -> Evaluated:
    return Evaluated(qarl, tiny_model("llama"), tmp_path_factory.mktemp("evaluated"))


def test_training_is_bit_identical_with_and_without_evaluations(evaluated):
    assert repeatable(evaluated.reference) == repeatable(evaluated.plain)
    for folder in ("rollouts", "checkpoints/000002", "checkpoints/latest"):
        assert files(evaluated.reference / folder) == files(evaluated.plain / folder), folder
    assert not (evaluated.plain / "evaluations.jsonl").exists() and not (evaluated.plain / "evaluations").exists()


def test_evaluations_come_before_training_every_n_steps_and_at_the_end(evaluated):
    records = jsonl(evaluated.reference / "evaluations.jsonl")
    assert [r["step"] for r in records] == [0, 2, 3]
    for record in records:
        assert [(t["name"], t["prompts"], t["samples"]) for t in record["tasks"]] == [("short", 3, 2), ("long", 4, 2)]
        assert set(record["tasks"][0]["pass"]) == {"1", "2"} and record["time/eval_s"] > 0
        rows = jsonl(evaluated.reference / "evaluations" / f"{record['step']:06d}.jsonl")
        assert len(rows) == 14 and {r["step"] for r in rows} == {record["step"]}
        assert max(r["tokens"] for r in rows) == 12  # not the rollouts' 8
    assert "evaluation after step 3: short avg@2 0." in evaluated.output
    assert "evaluation task short: dropped 6 prompts longer than data.max_prompt_length" in evaluated.output


def test_stopped_in_evaluations_a_run_goes_on_to_the_same_records(evaluated, tmp_path):
    run = tmp_path / "run"
    assert evaluated.train(run, before=in_evaluation(1, "SIGTERM")).code == 143
    assert evaluated.train(run, before=in_evaluation(3, "SIGKILL")).code == -9
    kept = jsonl(run / "evaluations.jsonl")
    assert [r["step"] for r in kept] == [0, 2]
    done = evaluated.train(run)
    assert done.code == 0, done.err
    assert jsonl(run / "evaluations.jsonl")[:2] == kept, "a finished evaluation was repeated"
    assert evaluations(run) == evaluations(evaluated.reference)
    assert files(run / "evaluations") == files(evaluated.reference / "evaluations")
    assert repeatable(run) == repeatable(evaluated.reference)


def test_going_back_forgets_the_evaluations_after_the_checkpoint(evaluated, tmp_path):
    run = shutil.copytree(evaluated.reference, tmp_path / "run", symlinks=True)
    with open(run / "evaluations.jsonl", "a") as file:
        file.write('{"step": 4, "ta')
    done = evaluated.train(run, "train.steps=2", f"checkpoint.resume={run}/checkpoints/000002")
    assert done.code == 0, done.err
    assert [r["step"] for r in jsonl(run / "evaluations.jsonl")] == [0, 2]
    assert sorted(p.name for p in (run / "evaluations").iterdir()) == ["000000.jsonl", "000002.jsonl"]


PROBLEMS = [{"prompt": f"{a} + {b}", "answer": str(a + b)} for a, b in ((1, 2), (3, 4), (5, 6))]
GRADE = "STRICT = 1\n\ndef grade(completions, prompts, **columns):\n    return [1.0 for c in completions]\n"


def _own_task(folder: Path, **task) -> dict:
    data = {"source": str(folder / "problems.json"), "max_prompt_length": 64}
    reward = [{"name": f"{folder}/grade.py:grade"}]
    return {"name": "own", "data": data, "reward": reward, **task}


def _loaded(folder: Path, model: Path, **task):
    from qarl.config import EvalTask
    from qarl.evaluation.tasks import load_tasks
    from qarl.policy.load import load_tokenizer

    config = EvalTask.model_validate(_own_task(folder, **task))
    return load_tasks([config], load_tokenizer(ModelConfig(path=str(model))))


def _evaluation_of(tasks) -> TrainingEvaluation:
    config = Config.model_validate({**settings(Path("unread")), "evaluation": {"samples": 1}})
    sampling = SamplingParams(1, 0, 8, Truncation(), (), frozenset())
    return TrainingEvaluation(config, tasks, None, sampling)


@pytest.mark.parametrize("what", ["answer", "order", "reward", "template"])
def test_a_task_with_other_data_is_refused_unless_it_has_another_name(tiny_model, tmp_path, what):
    model, rows, changes = tiny_model("llama"), PROBLEMS, {}
    (tmp_path / "problems.json").write_text(json.dumps(rows))
    (tmp_path / "grade.py").write_text(GRADE)
    before = _loaded(tmp_path, model)
    line = {"step": 2, "tasks": [{"name": "own"}], "task_fingerprints": {"own": before[0].fingerprint}}
    (tmp_path / "evaluations.jsonl").write_text(json.dumps(line) + "\n")
    if what == "answer":
        rows = [{**rows[0], "answer": "30"}, *rows[1:]]
    elif what == "order":
        rows = rows[::-1]
    elif what == "reward":
        (tmp_path / "grade.py").write_text(GRADE.replace("1\n", "2\n"))
    else:
        changes["data"] = {**_own_task(tmp_path)["data"], "prompt_template": "{prompt} ="}
    (tmp_path / "problems.json").write_text(json.dumps(rows))
    assert _evaluation_of(before).check(tmp_path, 2) == []
    changed = _evaluation_of(_loaded(tmp_path, model, **changes))
    with pytest.raises(UserError, match=r"^\S+evaluations.jsonl: evaluation task own had other .* step 2; restore"):
        changed.check(tmp_path, 2)
    assert changed.check(tmp_path, 1) == []  # the later one is forgotten
    assert _evaluation_of(_loaded(tmp_path, model, **changes, name="other")).check(tmp_path, 2) == []


def test_evaluations_that_cannot_be_are_refused_before_the_run_starts(evaluated, tmp_path):
    done = evaluated.train(tmp_path / "run", "evaluation.max_response_length=600", "data.max_prompt_length=32")
    assert done.code == 2 and "the context of 512 tokens; lower it" in done.err, done.err
    assert not (tmp_path / "run").exists()


def test_evaluation_may_be_changed_on_resumption_and_is_then_done_anew(evaluated, tmp_path):
    run = shutil.copytree(evaluated.reference, tmp_path / "run", symlinks=True)
    done = evaluated.train(run, "evaluation.samples=3", f"checkpoint.resume={run}/checkpoints/000002")
    assert done.code == 0, done.err
    samples = {r["step"]: r["tasks"][0]["samples"] for r in jsonl(run / "evaluations.jsonl")}
    assert samples == {0: 2, 2: 3, 3: 3}
    assert repeatable(run) == repeatable(evaluated.plain)
