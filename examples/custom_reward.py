"""A reward of your own: a function in a file, named in the configuration as `path/to/file.py:function`.

It gets the completions and prompts of a batch, every column of the data by its name, and `completion_ids`; it returns
one finite number a completion. It runs in worker processes, so keep the training below `if __name__ == "__main__"`.

    python examples/custom_reward.py      # on SmolLM2-135M
    python examples/custom_reward.py --model tiny
"""

from __future__ import annotations

from typing import Any

from example_model import arguments

import qarl


def closeness(completions: list[str], prompts: list[str], answer: list[str], **columns: list[Any]) -> list[float]:
    """1 for the right number, less the farther a completion's first number is from it, 0 for none."""
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        words = completion.split()
        digits = words[0].strip(".,") if words else ""
        number = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else None
        rewards.append(0.0 if number is None else 1 / (1 + abs(number - int(right))))
    return rewards


def main() -> None:
    given = arguments(__doc__, steps=4)
    config: dict[str, Any] = {
        "model": {"path": given.model},
        "quant": {"scheme": "fp8"},
        "rollout": {"n": 4, "max_response_length": 8},
        "data": {"source": "task:arithmetic", "chat_template": False, "max_prompt_length": 64},
        "reward": {
            "functions": [
                {"name": f"{__file__}:closeness"},
                {"name": "length", "weight": 0.1, "options": {"target": 4, "unit": "tokens"}},
            ]
        },
        "train": {"steps": given.steps, "prompts_per_step": 4, "run_dir": given.out / "run"},
    }
    result = qarl.train(config)
    for name in sorted(name for name in result.metrics[-1] if name.startswith("reward/")):
        print(f"{name}: {[round(value, 3) for value in result.series(name)]}")


if __name__ == "__main__":
    main()
