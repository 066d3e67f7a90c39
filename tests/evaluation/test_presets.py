"""The papers' sets: by hub name with a patched loader, and by local file with the same columns and template."""

import base64
import json
import pickle
import zlib
from contextlib import ExitStack, closing

import datasets
import pytest

from qarl.config import EvalTask, ModelConfig
from qarl.config.evaluation_presets import PRESETS
from qarl.errors import UserError
from qarl.evaluation.tasks import TaskRewards, load_tasks
from qarl.policy.load import load_tokenizer
from qarl.types import Rollout

ANSWERS = {"gsm8k": "3 times 4 is <<3*4=12>>12.\n#### 12", "olympiadbench": ["$12$"]}
ASKED = "What is $3 \\times 4$?"
MATH = [name for name, preset in PRESETS.items() if preset.reward == [{"name": "math"}]]
# One row of each of the other sets, in the schema that its page on the hub shows.
ROWS = {
    "arc_challenge": {
        "id": "Mercury_7175875",
        "question": ASKED,
        "choices": {"text": ["11", "12", "13", "14"], "label": ["A", "B", "C", "D"]},
        "answerKey": "B",
    },
    "gpqa_diamond": {
        "Record ID": "rec0",
        "Question": ASKED,
        "Correct Answer": "12",
        "Incorrect Answer 1": "11",
        "Incorrect Answer 2": "13",
        "Incorrect Answer 3": "14",
        "Subdomain": "Arithmetic",
    },
    "mmlu_pro": {
        "question_id": 70,
        "question": ASKED,
        "options": [str(n) for n in range(8, 18)],
        "answer": "E",
        "answer_index": 4,
        "cot_content": "",
        "category": "math",
        "src": "ori_mmlu-elementary_mathematics",
    },
    "livecodebench": {
        "question_title": "A. Product",
        "question_content": ASKED,
        "platform": "codeforces",
        "question_id": "1873_A",
        "contest_date": "2023-08-21T00:00:00",
        "starter_code": "",
        "difficulty": "easy",
        "public_test_cases": json.dumps([{"input": "3 4\n", "output": "12\n", "testtype": "stdin"}]),
        "private_test_cases": base64.b64encode(
            zlib.compress(pickle.dumps(json.dumps([{"input": "5 6\n", "output": "30\n", "testtype": "stdin"}])))
        ).decode(),
        "metadata": "{}",
    },
}


def row(name: str) -> dict:
    preset = PRESETS[name]
    if name in ROWS:
        return ROWS[name]
    return {preset.prompt: ASKED, str(preset.answer): ANSWERS.get(name, "12"), "other": None}


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return load_tokenizer(ModelConfig(path=str(tiny_model("llama"))))


def response(text: str) -> Rollout:
    return Rollout(0, 0, [5], [0.0], "stop", 0, 0, text)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_asks_the_hub_for_its_subset_and_split(name, tokenizer, monkeypatch):
    asked = []

    def load_dataset(*arguments, split):
        asked.append((*arguments, split))
        return datasets.Dataset.from_list([row(name)] * 3)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (task,) = load_tasks([EvalTask(preset=name, max_prompts=2)], tokenizer)
    preset = PRESETS[name]
    assert asked == [(preset.source, preset.subset, preset.split)]
    assert (task.name, len(task.prompts), task.correct_at) == (name, 2, 1.0)
    text = task.prompts[0].text
    if name in MATH:
        assert f"{ASKED}\n\nPlease reason" in text and "\\boxed{}" in text
    elif name == "livecodebench":
        assert f"{ASKED}\n\n\n\nWrite a Python program" in text
    else:
        right = task.prompts[0].columns["answer"]
        assert f"{ASKED}\n\nA. " in text and f"\n{right}. 12\n" in f"\n{text}" and "'The answer is (X)'" in text


@pytest.fixture
def local(tmp_path):
    """local(name, rows) -> the task of a preset over a file with these rows, by default one of its own."""

    def make(name: str, *rows: dict, **keys) -> EvalTask:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in rows or [row(name)]))
        return EvalTask(preset=name, path=str(path), **keys)

    return make


@pytest.fixture
def rewards_of():
    """rewards_of(tasks) -> their rewards, closed afterwards."""
    with ExitStack() as stack:
        yield lambda tasks: stack.enter_context(closing(TaskRewards(tasks, None, None)))


def test_a_local_file_gives_the_same_task_as_the_hub(tokenizer, local, monkeypatch):
    for name in PRESETS:
        rows = datasets.Dataset.from_list([row(name)])
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, rows=rows, **__: rows)
        hub, file = load_tasks([EvalTask(preset=name), local(name)], tokenizer)
        assert hub.fingerprint == file.fingerprint, name


def right_and_wrong(task) -> tuple[str, str]:
    if task.name == "livecodebench":
        program = "```python\na, b = map(int, input().split())\nprint({})\n```"
        return program.format("a * b"), program.format("12")
    if task.name in MATH:
        return "It is \\boxed{12}.", "It is \\boxed{13}."
    right = task.prompts[0].columns["answer"]
    return f"The answer is ({right}).", f"The answer is ({'A' if right != 'A' else 'B'})."


def test_every_preset_rewards_its_own_kind_of_answer(tokenizer, local, rewards_of):
    loaded = load_tasks(list(map(local, PRESETS)), tokenizer)
    rewards = rewards_of(loaded)
    for task in loaded:
        both = [response(text) for text in right_and_wrong(task)]
        assert rewards.score(task, task.prompts, both).total == [1.0, 0.0], task.name


def test_several_answers_are_compared_as_a_set(tokenizer, local, rewards_of):
    several = {"question": "Roots?", "final_answer": ["$2$", "$-\\frac{1}{3}$"]}
    loaded = load_tasks([local("olympiadbench", several)], tokenizer)
    both = [response(text) for text in ("\\boxed{-\\frac{1}{3}, 2}", "\\boxed{2}")]
    assert rewards_of(loaded).score(loaded[0], loaded[0].prompts, both).total == [1.0, 0.0]


def test_a_file_without_the_answer_column_is_refused_with_the_columns_it_has(tokenizer, local):
    with pytest.raises(UserError, match=r"evaluation task gsm8k: .*no column `answer`; it has: question, solution$"):
        load_tasks([local("gsm8k", {"question": "1?", "solution": "1"})], tokenizer)
