"""Inputs that changed under the same configuration are noticed wherever numbers of runs are combined."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from comparisons import evaluation, settings_of, step_record, write_model
from hand_made_runs import draw_nothing

from qarl.comparison.compare import compare_runs
from qarl.comparison.plan import Member, find_finished
from qarl.config import Config
from qarl.errors import UserError
from qarl.storage.history import History
from qarl.storage.input_files import present_inputs
from qarl.storage.rundir import RunDirectory
from qarl.storage.runs import read_run

# File -> its contents, and its name in messages.
FILES = {
    "model/config.json": (None, "model.path: config.json"),
    "model/generation_config.json": ('{"eos_token_id": 1}', "model.path: generation_config.json"),
    "model/tokenizer.json": ('{"model": {"vocab": {"a": 0}}}', "model.path: tokenizer.json"),
    "model/tokenizer_config.json": ('{"bos_token": "<s>"}', "model.path: tokenizer_config.json"),
    "model/chat_template.jinja": ("{{ messages[0].content }}", "model.path: chat_template.jinja"),
    "model/model.safetensors.index.json": (
        '{"weight_map": {"a": "one.safetensors"}}',
        "model.path: model.safetensors.i",
    ),
    "model/one.safetensors": ("not really, but planning reads no weights" * 30_000, "model.path: one.safetensors"),
    "rows/train.jsonl": ('{"prompt": "1 + 1", "answer": "2"}\n' * 3, "data.source: train.jsonl"),
    "reward.py": ("import helper\nGAIN = 1\n\ndef judge(completions, prompts, **columns): ...\n", "source of `judge`"),
    "helper.py": ("WORDS = ['a']\n", "source of `judge`"),
    "objective.py": ("BETA = 0.5\n\ndef mine(inputs): ...\n", "objective.path: the source of `mine`"),
    "test.json": ('[{"prompt": "2 + 2", "answer": "4"}]', "evaluation.tasks.sums: data.source"),
    "grade.py": ("def grade(completions, prompts, **columns): ...\n", "evaluation.tasks.sums: the source of `grade`"),
}


@dataclass
class World:
    """A configuration that names a file of every kind, and finished runs of it."""

    folder: Path

    def config(self, seed: int = 0, run_dir: str = "run", **sections: dict) -> Config:
        source = {"source": f"{self.folder}/test.json", "max_prompt_length": 64}
        task = {"name": "sums", "data": source, "reward": [{"name": f"{self.folder}/grade.py:grade"}]}
        own = {
            "data": {"source": f"{self.folder}/rows"},
            "reward": {"functions": [{"name": f"{self.folder}/reward.py:judge"}]},
            "objective": {"name": "custom", "path": f"{self.folder}/objective.py:mine"},
            "evaluation": {"tasks": [task], "samples": 2, "max_response_length": 8},
            "train": {"steps": 4, "seed": seed, "run_dir": f"{self.folder}/{run_dir}"},
        }
        return Config.model_validate(settings_of(self.folder / "model", **own | sections))

    def trained(self, config: Config) -> Path:
        """A finished run, begun as training begins one."""
        with RunDirectory.open(config, "auto") as run:
            run.begin(present_inputs(config, ["reward", "objective"]))
            metrics = "".join(json.dumps(step_record(step)) + "\n" for step in range(1, config.train.steps + 1))
            (run.path / "metrics.jsonl").write_text(metrics)
            (run.path / "evaluations.jsonl").write_text(json.dumps(evaluation(4, 0.5)) + "\n")
        return run.path

    def own(self, config: Config) -> Member:
        """A member in whose directory `config` was trained."""
        member = Member("m", "w4a16", "aligned", config.train.seed, Path(config.run_dir), config)
        find_finished([member], [])
        return member

    def reusing(self, config: Config, run: Path) -> tuple[Member, list[str]]:
        member = Member("m", "w4a16", "aligned", config.train.seed, self.folder / "not-there", config)
        return member, find_finished([member], [read_run(run)])


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    folder = tmp_path_factory.mktemp("world")
    write_model(folder / "model")
    (folder / "rows").mkdir()
    for name, (content, _) in FILES.items():
        if content is not None:
            (folder / name).write_text(content)
    found = World(folder)
    found.trained(found.config())
    return found


@pytest.mark.parametrize("name", FILES)
def test_a_change_of_any_input_is_noticed_and_undoing_it_makes_the_run_count_again(world, name):
    file, config = world.folder / name, world.config()
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        with pytest.raises(UserError) as caught:
            world.own(config)
        said = str(caught.value)
        assert FILES[name][1] in said and "restore that, or choose another --out" in said and "\n" not in said
        member, lines = world.reusing(config, Path(config.run_dir))
        assert (member.state, member.reused) == ("waiting", False)
        assert len(lines) == 1 and "is not reused" in lines[0] and FILES[name][1] in lines[0]
    finally:
        file.write_bytes(content)
    assert world.own(config).reused


def test_a_run_of_fewer_steps_is_continued_and_one_of_more_is_refused(world):
    of = world.config().train
    fewer, more = (world.config(train=of.model_copy(update={"steps": steps}).model_dump()) for steps in (3, 5))
    member = world.own(more)
    assert (member.state, member.reused) == ("waiting", False)
    with pytest.raises(UserError, match=r"holds 4 steps, more than train.steps = 3; choose another --out, or raise"):
        world.own(fewer)


@pytest.mark.parametrize("name", ["model/added_tokens.json", "rows/more.jsonl"])
def test_a_new_file_is_noticed(world, name):
    (world.folder / name).write_text('{"prompt": "3 + 3", "answer": "6"}\n')
    try:
        with pytest.raises(UserError, match=Path(name).name):
            world.own(world.config())
    finally:
        (world.folder / name).unlink()


@pytest.mark.parametrize(("key", "value", "same"), [("samples", 3, False), ("every", 2, True)])
def test_evaluations_with_other_settings_are_not_averaged(world, key, value, same):
    config = world.config()
    other = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={key: value, "pass_at": [1]})})
    if same:
        other = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={key: value})})
        assert world.own(other).reused
        return
    with pytest.raises(UserError, match=rf"its evaluations have other settings .*{key} is"):
        world.own(other)


def test_a_run_that_changed_its_reward_is_no_member(world):
    """`checkpoint.allow_changed` lets such a run continue, but its numbers belong to neither reward alone."""
    config = world.config(run_dir="mixed")
    path = world.trained(config)
    file = world.folder / "reward.py"
    content = file.read_bytes()
    for text in (content + b"GAIN = 2\n", content):
        file.write_bytes(text)
        with RunDirectory.open(config, "auto") as run:
            run.begin(present_inputs(config, ["reward", "objective"]), History(checkpoint=2))
    with pytest.raises(UserError, match=r"used several versions of reward.functions: the source of `judge`; train it"):
        world.own(config)
    assert json.loads((path / "environment.json").read_text())["inputs"]["changed"]


def test_a_run_without_its_last_evaluation_or_of_another_start_is_no_member(world):
    config = world.config(run_dir="started")
    run = world.trained(config)
    (run / "evaluations.jsonl").write_text(json.dumps(evaluation(2, 0.5)) + "\n")  # killed in the one after step 4
    assert world.own(config).state == world.reusing(config, run)[0].state == "waiting"
    world.trained(config)
    metrics = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(metrics[1:]))
    assert world.reusing(config, run)[0].state == "waiting"
    with pytest.raises(UserError, match=r"its first step is 2 there, checkpoint.resume is auto here"):
        world.own(config)


def test_a_run_whose_schedule_was_stretched_is_no_member(world):
    config = world.config(run_dir="long", optim={"schedule": "cosine"})
    longer = config.model_copy(update={"train": config.train.model_copy(update={"steps": 5})})
    world.trained(config)
    with pytest.raises(UserError, match=r"train.steps is 4 there, 5 here, and optim.schedule cosine depends on it"):
        world.own(longer)
    with RunDirectory.open(longer, "auto") as run:
        run.begin(present_inputs(longer, ["reward", "objective"]), History(checkpoint=2))
    with pytest.raises(UserError, match=r"used several versions of train.steps, which optim.schedule depends"):
        world.own(longer)


def test_a_run_of_an_older_version_counts_with_a_notice(world, tmp_path, capsys, monkeypatch):
    draw_nothing(monkeypatch)
    config = world.config(run_dir="old")
    path = world.trained(config)
    environment = json.loads((path / "environment.json").read_text())
    del environment["inputs"]
    (path / "environment.json").write_text(json.dumps(environment))
    assert world.own(config).reused
    (path / "metrics.jsonl").write_text((path / "metrics.jsonl").read_text().replace('{"step": 2', "{", 1))
    compare_runs([path, world.folder / "run"], tmp_path / "out")
    said = capsys.readouterr().out
    assert f"{path.name}: an older qarl recorded no" in said
    assert f"{path.name}: unreadable lines of metrics.jsonl are left out" in said


def test_existing_runs_of_different_inputs_are_compared_with_a_notice_and_form_no_group(
    world, tmp_path, capsys, monkeypatch
):
    draw_nothing(monkeypatch)
    runs = [world.folder / "run"]
    file = world.folder / "reward.py"
    content = file.read_bytes()
    for seed in (1, 2):
        runs.append(world.trained(world.config(seed, f"seed-{seed}")))
        file.write_bytes(content + b" ")
    file.write_bytes(content)
    assert compare_runs(runs[:2], tmp_path / "same") == 0
    assert "different inputs" not in capsys.readouterr().out
    same = json.loads((tmp_path / "same/comparison.json").read_text())
    assert same["groups"] and not same["input_differences"] and not same["notices"]
    assert compare_runs(runs, tmp_path / "out") == 0
    line = "the runs were made from different inputs: reward: judge"
    assert line in capsys.readouterr().out.replace("\n", " ")
    mixed = json.loads((tmp_path / "out/comparison.json").read_text())
    assert mixed["groups"] == [] and len(mixed["input_differences"]) == 1
    assert line in (tmp_path / "out/comparison.html").read_text().replace("&#39;", "'")
