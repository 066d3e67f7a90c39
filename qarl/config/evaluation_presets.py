"""Built-in evaluation sets: hub dataset, columns and prompt template of each.

Plain data that the configuration turns into `data` sections, so this module imports nothing else from qarl.
"""

import os
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

# The instruction of Qwen2.5-Math's and most RL papers' evaluations; the reward `math` reads the box.
BOXED = "{prompt}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."


CHOICE = (
    "{prompt}\n\n{choices}\n\nThink step by step, and end with 'The answer is (X)', where X is the letter of the right "
    "option."
)
CODE = "{prompt}\n\n{starter_code}\n\nWrite a Python program that solves this, and end with it in one ```python block."


@dataclass(frozen=True)
class Preset:
    """One evaluation set.

    Attributes:
        source, subset, split: Arguments of `datasets.load_dataset`.
        prompt: Column of the question.
        answer: Column of the answer; None if there is no such column or `choices` creates it.
        template: `data.prompt_template`.
        choices: `data.choices`, for multiple-choice questions.
        reward: `reward.functions`.
        reads: Columns that the reward reads.
    """

    source: str
    split: str
    prompt: str
    answer: str | None = None
    subset: str | None = None
    template: str = BOXED
    choices: dict[str, Any] | None = None
    reward: list[dict[str, Any]] = field(default_factory=lambda: [{"name": "math"}])
    reads: tuple[str, ...] = ("answer",)

    def data(self, path: str | None = None) -> dict[str, Any]:
        """The `data` section of the set. path: a local copy (file or directory) with the same columns."""
        where: dict[str, Any] = {"source": self.source, "subset": self.subset, "split": self.split}
        if path is not None:
            one_file = not os.path.isdir(os.path.expanduser(path))  # never raises; `check_inputs` refuses the path
            where = {"source": path, "split": "train" if one_file else self.split}
        columns = {"prompt": self.prompt} | ({} if self.answer is None else {"answer": self.answer})
        shape = {"columns": columns, "choices": self.choices, "prompt_template": self.template}
        return {**where, **shape, "shuffle": False}


def _choice(source: str, split: str, prompt: str, subset: str | None = None, **choices: Any) -> Preset:
    return Preset(source, split, prompt, None, subset, CHOICE, choices, [{"name": "choice"}])


PRESETS = {
    "math500": Preset("HuggingFaceH4/MATH-500", "test", "problem", "answer"),  # 500 problems
    "aime24": Preset("HuggingFaceH4/aime_2024", "train", "problem", "answer"),  # 30 problems
    "aime25": Preset("math-ai/aime25", "test", "problem", "answer"),  # 30 problems
    "amc": Preset("math-ai/amc23", "test", "question", "answer"),  # 40 problems
    "gsm8k": Preset("openai/gsm8k", "test", "question", "answer", subset="main"),  # 1319 problems
    "minerva": Preset("math-ai/minervamath", "test", "question", "answer"),  # 272 problems
    "olympiadbench": Preset("math-ai/olympiadbench", "test", "question", "final_answer"),  # 674 problems
    # QaRL's sets outside the training distribution.
    "arc_challenge": _choice(  # 1172 questions
        "allenai/ai2_arc",
        "test",
        "question",
        "ARC-Challenge",
        options=["choices.text"],
        labels="choices.label",
        right="answerKey",
        shuffle_seed=0,
    ),
    "gpqa_diamond": _choice(  # 198 questions, behind a form on the hub
        "Idavidrein/gpqa",
        "train",
        "Question",
        "gpqa_diamond",
        options=["Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"],
        shuffle_seed=0,
    ),
    "mmlu_pro": _choice(  # 12032 questions
        "TIGER-Lab/MMLU-Pro", "test", "question", options=["options"], right="answer_index", shuffle_seed=0
    ),
    "livecodebench": Preset(
        "livecodebench/code_generation_lite",
        "test",
        "question_content",
        template=CODE,
        reward=[
            {
                "name": "code",
                "options": {"column": ["public_test_cases", "private_test_cases"], "metadata_column": "metadata"},
            }
        ],
        reads=("public_test_cases", "private_test_cases", "metadata"),
    ),
}


def unknown_preset(name: str) -> str:
    """Error text for an unknown preset name."""
    near = get_close_matches(name.lower().replace("-", "").replace("_", ""), PRESETS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known sets: {', '.join(PRESETS)}"
    return f"no such evaluation set; {hint}"
