"""Runs whose rewards read nested answers and token counts, and whose reward file cannot be loaded."""

import json

import pytest
from run_faults import recorded
from tiny_runs import settings, write_config

pytestmark = pytest.mark.slow

# As the rows of DAPO's data: the prompt a conversation, the answer inside a struct. The tiny model ends no answer by
# itself, so an answer that any text has in it is one that can be reached.
ROWS = [
    {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": [{"type": "text", "text": f"what is {i}?"}], "name": None}],
        "reward_model": {"ground_truth": "" if i % 2 else "no text has this in it", "style": "rule"},
        "extra_info": {"index": i},
    }
    for i in range(8)
]
COLUMNS = {"answer": "reward_model.ground_truth", "index": "extra_info.index"}
JUDGE = """
def judge(completions, prompts, answer, index, completion_ids, **columns):
    assert all(isinstance(i, int) for i in index) and sorted(columns) == ["data_source", "extra_info", "reward_model"]
    return [float(a in c) - len(ids) / 1000 - len(c) / 1e6 for c, a, ids in zip(completions, answer, completion_ids)]
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "judge.py").write_text(JUDGE)
    return tmp_path


def config(folder, tiny_model, **sections):
    sections = {
        "data": {"source": "rows.jsonl", "columns": COLUMNS},
        "reward": {"functions": [{"name": "judge.py:judge"}]},
        "train": {"steps": 2, "prompts_per_step": 4, "minibatch_size": 16, "run_dir": "runs/r"},
        **sections,
    }
    return write_config(folder / "c.yaml", settings(tiny_model("llama"), **sections))


def test_a_dataset_of_nested_answers_is_trained_on(qarl, tiny_model, folder):
    done = qarl.run("train", config(folder, tiny_model), cwd=folder)
    assert done.code == 0, done.err
    metrics = recorded(folder / "runs/r")
    assert [m["reward/failed"] for m in metrics] == [0.0, 0.0]
    rows = [json.loads(line) for s in (1, 2) for line in (folder / f"runs/r/rollouts/00000{s}.jsonl").open()]
    assert {row["prompt_id"] for row in rows} == set(range(8))  # two steps of four: every row was dealt
    for row in rows:
        right = row["prompt_id"] % 2  # where the answer can be reached
        assert row["reward"] == right - row["tokens"] / 1000 - len(row["completion"]) / 1e6
    assert max(m["policy/grad_norm"] for m in metrics) > 0


def test_a_reward_file_that_dies_while_it_is_loaded_says_why_and_where(qarl, tiny_model, folder):
    (folder / "judge.py").write_text("import os\nprint('first')\nprint('no \\x1b[31mlicence')\nos._exit(3)\n")
    done = qarl.run("train", config(folder, tiny_model), cwd=folder)
    assert done.code == 2 and done.err.count("\n") == 1
    assert "`judge`: while loading it, its worker process exited with code 3; last output: " in done.err
    assert "licence (full output in runs/r/rewards.log)" in done.err and "\x1b" not in done.err
    assert (folder / "runs/r/rewards.log").read_bytes() == b"first\nno \x1b[31mlicence\n"
    (folder / "judge.py").write_text(JUDGE)
    assert qarl.run("train", config(folder, tiny_model), cwd=folder).code == 0  # the same command, once it is mended
