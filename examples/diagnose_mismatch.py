"""What alignment buys: the same run with a full-precision and with an aligned learner, and the mismatch of each.

Also shows how to read a run's metrics, of this process or of any run directory, without torch.

    python examples/diagnose_mismatch.py      # on SmolLM2-135M
    python examples/diagnose_mismatch.py --model tiny
"""

from __future__ import annotations

from typing import Any

from example_model import arguments

import qarl
from qarl.storage.runs import read_run

METRICS = ("mismatch/delta_abs_mean", "mismatch/delta_abs_max", "mismatch/ppl_ratio", "correction/ess")


def main() -> None:
    given = arguments(__doc__, steps=3)
    config: dict[str, Any] = {
        "model": {"path": given.model},
        "quant": {"scheme": "w4a16", "group_size": 64},
        "rollout": {"n": 4, "max_response_length": 16},
        "data": {"source": "task:arithmetic", "chat_template": False, "max_prompt_length": 64},
        "reward": {"functions": [{"name": "exact"}]},
        "objective": {"name": "grpo"},
        "train": {"steps": given.steps, "prompts_per_step": 4},
        "logging": {"console": "none"},
    }
    runs = {}
    for learner in ("full_precision", "aligned"):
        run_dir = given.out / learner
        qarl.train(config, {"quant.learner": learner, "train.run_dir": run_dir})
        runs[learner] = read_run(run_dir).metrics  # as the result's `metrics`; any run directory will do
    print(f"{'last step':<26}" + "".join(f"{learner:>18}" for learner in runs))
    for name in METRICS:
        values = [rows[-1].get(name) for rows in runs.values()]
        print(f"{name:<26}" + "".join(f"{'-' if value is None else format(value, '.4g'):>18}" for value in values))
    print(f"\nmore: qarl diagnose {given.out / 'full_precision'}")


if __name__ == "__main__":
    main()
