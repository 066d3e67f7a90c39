"""The time that chat templates see is that of a run's first start: on all ranks, and in every later start."""

import json
import shutil
from datetime import datetime
from pathlib import Path

import pytest
from thread_ranks import as_threads
from tiny_runs import settings, write_config

from qarl.config import Config
from qarl.inference.generate import GenerateOptions, render
from qarl.inference.target import resolve_target
from qarl.policy.load import load_tokenizer
from qarl.storage.saved_state import first_start, started_at

DATED = (
    "[{{ strftime_now('%d %b %Y %H:%M:%S.%f') }}]{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
)


def dates(path: Path, key: str = "prompt") -> set[str]:
    return {json.loads(line)[key].split("]")[0] for line in path.read_text().splitlines()}


@pytest.mark.slow
def test_a_run_keeps_the_time_of_its_first_start(qarl, tiny_model, tmp_path):
    model = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    (model / "chat_template.jinja").write_text(DATED)
    task = {
        "name": "held-out",
        "data": {"source": "task:arithmetic", "max_prompt_length": 64},
        "reward": [{"name": "exact"}],
        "max_prompts": 2,
    }
    data = settings(
        model,
        train={"steps": 1, "run_dir": str(tmp_path / "run")},
        checkpoint={"every": 1},
        logging={"tensorboard": False},
        evaluation={"tasks": [task], "samples": 1, "max_response_length": 2},
    )
    config = write_config(tmp_path / "c.yaml", data)
    for steps in (1, 2):
        done = qarl.run("train", config, f"train.steps={steps}")
        assert done.code == 0, done.err
    run = tmp_path / "run"
    files = [run / "rollouts" / "000001.jsonl", run / "rollouts" / "000002.jsonl", *run.glob("evaluations/*.jsonl")]
    (date,) = set.union(*map(dates, files))
    began = started_at(run / "checkpoints" / "000002")
    assert began is not None and date == began.strftime("[%d %b %Y %H:%M:%S.%f")

    target = resolve_target(str(run))
    prompt = render(target, load_tokenizer(target.model), ["hi"], GenerateOptions())[0]
    assert prompt.text.split("]")[0] == date


def test_all_ranks_take_the_time_of_the_first(tmp_path):
    config = Config.model_validate(settings(tmp_path, train={"run_dir": str(tmp_path)}))
    before = datetime.now()
    times = as_threads(3, lambda ranks: first_start(config, ranks))
    assert len(set(times)) == 1 and before <= times[0] <= datetime.now()


@pytest.mark.parametrize("state", ["{", "{}", '{"started": "soon"}'])
def test_a_checkpoint_without_the_time_gives_none(tmp_path, state):
    (tmp_path / "state.json").write_text(state)
    assert started_at(tmp_path) is None and started_at(tmp_path / "missing") is None and started_at(None) is None
