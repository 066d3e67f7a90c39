"""From the command line and the run's own section to what is evaluated."""

import pytest
from plain_settings import plain_config

from qarl.config import EvaluationConfig, ModelConfig, QuantConfig
from qarl.errors import UserError
from qarl.evaluation.request import Request, evaluation_section
from qarl.inference.target import Target

REWARD = [{"name": "exact"}]
OWN = {"name": "sums", "data": {"source": "task:arithmetic", "task": {"seed": 9}}, "reward": REWARD}


def run(**evaluation) -> Target:
    config = plain_config(evaluation=evaluation)
    return Target("run", "runs/a", config.model, config.quant, config)


MODEL = Target("model", "m", ModelConfig(path="m"), QuantConfig())


def test_without_tasks_a_run_is_evaluated_on_its_training_data_and_says_so():
    section, notes = evaluation_section(run(), Request(max_prompts=5))
    (task,) = section.tasks
    assert (task.name, task.dataset.source, task.dataset.max_rows) == ("train", "task:arithmetic", 5)
    assert [f.name for f in task.functions] == ["exact"]
    assert notes == ["no --data and no evaluation.tasks in the run: using its training data, at most 5 rows"]


def test_a_given_set_does_not_end_like_the_runs_own_rollouts():
    section, _ = evaluation_section(run(), Request(data=("gsm8k",)))
    assert (section.max_response_length, section.stop) == (1024, [])


def test_greedy_draws_one_sample_unless_told_otherwise():
    section, _ = evaluation_section(MODEL, Request(data=("amc",), temperature=0.0))
    assert (section.samples, section.pass_at) == (1, [1])
    with pytest.raises(UserError, match=r"samples = 4: greedy .* must be 1"):
        evaluation_section(MODEL, Request(data=("amc",), temperature=0.0, samples=4))


@pytest.mark.parametrize(
    "request_, message",
    [
        (Request(), r"^--data: m is not a run and has no data of its own; give math500, "),
        (Request(data=("gsm-8",)), r"^--data gsm-8: no such evaluation set; did you mean gsm8k\?$"),
        (Request(data=("gsm8k=/nowhere.jsonl",)), r"^--data gsm8k=/nowhere\.jsonl: no such file or directory"),
        (Request(data=("amc",), samples=2, pass_at=(4,)), r"^--k: pass_at\.0 = 4: must be 2 \(samples\) or less"),
        (Request(data=("amc", "amc")), r'^command line: tasks\.1\.name = "amc": is the name of an earlier task too'),
    ],
)
def test_refusals_are_one_line(request_, message):
    with pytest.raises(UserError, match=message) as caught:
        evaluation_section(MODEL, request_)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "section, key, message",
    [
        ({"tasks": [{"preset": "gsm9k"}]}, ("tasks", 0, "preset"), "did you mean gsm8k"),
        ({"tasks": [{"data": {"source": "a/b"}, "reward": REWARD}]}, ("tasks", 0, "name"), "needs a name"),
        ({"tasks": [{"name": "a", "data": {"source": "a/b"}}]}, ("tasks", 0, "reward"), "needs its reward"),
        ({"tasks": [{"preset": "amc", "data": OWN["data"]}]}, ("tasks", 0, "data"), "leave out preset, or data"),
        ({"tasks": [OWN | {"path": "x.jsonl"}]}, ("tasks", 0, "path"), "set data.source"),
        ({"tasks": [OWN, OWN]}, ("tasks", 1, "name"), "an earlier task"),
        ({"every": 2}, ("every",), "nothing to evaluate"),
        ({"tasks": [OWN], "pass_at": [1, 8]}, ("pass_at", 1), "must be 4"),
        ({"tasks": [OWN], "temperature": 0.0}, ("samples",), "must be 1"),
    ],
)
def test_sections_that_make_no_sense_are_refused_at_their_key(section, key, message):
    from pydantic import ValidationError

    with pytest.raises(ValidationError) as caught:
        EvaluationConfig.model_validate(section)
    faults = [((*e["loc"], *f.key), f.text) for e in caught.value.errors() for f in e["ctx"]["faults"]]
    assert [(where, message in text) for where, text in faults] == [(key, True)]


def test_when_an_evaluation_is_due():
    def steps(**section):
        config = EvaluationConfig(**section)
        return [s for s in range(8) if config.due(s, 7)]

    assert steps(tasks=[OWN], every=3) == [0, 3, 6, 7]
    assert steps(tasks=[OWN]) == [0, 7]
    assert steps(tasks=[OWN], every=2, before_training=False, at_end=False) == [2, 4, 6]
    assert steps() == []
