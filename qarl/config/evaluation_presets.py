"""The papers' evaluation sets: where each is on the hub, its columns, and how a problem is put to the model.

Plain data: the configuration turns it into a `data` section, so it imports nothing of the rest.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

# The instruction of Qwen2.5-Math's and most RL papers' evaluations; the reward `math` reads the box.
BOXED = "{prompt}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."


@dataclass(frozen=True)
class Preset:
    """One set. source, subset, split: as `datasets.load_dataset` takes them. prompt, answer: columns."""

    source: str
    split: str
    prompt: str
    answer: str
    subset: str | None = None

    def data(self, path: str | None = None) -> dict[str, Any]:
        """The `data` section of the set. path: a local copy (file or directory) with the same columns."""
        where: dict[str, Any] = {"source": self.source, "subset": self.subset, "split": self.split}
        if path is not None:
            one_file = not os.path.isdir(os.path.expanduser(path))  # never raises; `check_inputs` refuses the path
            where = {"source": path, "split": "train" if one_file else self.split}
        columns = {"prompt": self.prompt, "answer": self.answer}
        return {**where, "columns": columns, "prompt_template": BOXED, "shuffle": False}

    @property
    def reward(self) -> list[dict[str, Any]]:
        """The `reward.functions` of the set."""
        return [{"name": "math"}]


PRESETS = {
    "math500": Preset("HuggingFaceH4/MATH-500", "test", "problem", "answer"),  # 500 problems
    "aime24": Preset("HuggingFaceH4/aime_2024", "train", "problem", "answer"),  # 30 problems
    "aime25": Preset("math-ai/aime25", "test", "problem", "answer"),  # 30 problems
    "amc": Preset("math-ai/amc23", "test", "question", "answer"),  # 40 problems
    "gsm8k": Preset("openai/gsm8k", "test", "question", "answer", subset="main"),  # 1319 problems
    "minerva": Preset("math-ai/minervamath", "test", "question", "answer"),  # 272 problems
    "olympiadbench": Preset("math-ai/olympiadbench", "test", "question", "final_answer"),  # 674 problems
}


def unknown_preset(name: str) -> str:
    """What to say of a name that is no preset."""
    near = get_close_matches(name.lower().replace("-", "").replace("_", ""), PRESETS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(PRESETS)}"
    return f"no such evaluation set; {hint}"
