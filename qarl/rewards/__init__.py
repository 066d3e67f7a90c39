"""Built-in and custom reward functions, run in worker processes with a time limit.

A reward function has TRL's signature, `f(completions, prompts, **columns) -> list[float | None]`: response texts,
prompts, and one list per data column, all of the same length. The column `completion_ids` holds the token ids of the
responses. None means that the function does not score a row.
"""

from qarl.rewards.batch import RewardResult
from qarl.rewards.pool import RewardPool

__all__ = ["RewardPool", "RewardResult"]
