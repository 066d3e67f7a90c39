"""Train from Python: a model learns small sums under W4A16, and its rewards are read from the result.

To run it:

    python examples/train_arithmetic.py      # on SmolLM2-135M
    python examples/train_arithmetic.py --model tiny --steps 3
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

from example_model import arguments

import qarl


def main() -> None:
    given = arguments(__doc__, steps=12)
    config: dict[str, Any] = {
        "model": {"path": given.model},
        "quant": {"scheme": "w4a16", "group_size": 64},
        "rollout": {"n": 8, "max_response_length": 6, "stop": ["\n"]},
        "data": {
            "source": "task:arithmetic",
            "task": {"operations": ["+", "-"], "min": 1, "max": 9},
            "chat_template": False,
            "prompt_template": "2 + 2 = 4\n5 - 1 = 4\n{prompt} =",
            "max_prompt_length": 64,
        },
        "reward": {"functions": [{"name": "exact"}]},
        "optim": {"lr": 5e-6},
        "train": {"steps": given.steps, "run_dir": given.out / "run"},
    }
    result = qarl.train(config)

    rewards = result.series("reward/mean")
    third = max(1, len(rewards) // 3)
    print(f"{result.step} steps in {result.run_dir}, checkpoint {result.checkpoint}")
    print(
        f"mean reward: {fmean(rewards[:third]):.2f} over the first third, {fmean(rewards[-third:]):.2f} over the last"
    )
    print(f"largest mismatch of sampler and learner: {max(result.series('mismatch/delta_abs_max'))} nats")


if __name__ == "__main__":
    main()
