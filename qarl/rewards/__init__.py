"""Reward functions, built-in and the user's own, run in worker processes under a time limit.

A reward function has TRL's signature, `f(completions, prompts, **columns) -> list[float | None]`: the responses' texts,
the prompts, and one list per data column, all of the same length. The column `completion_ids` holds the token ids of
the responses. None for a row means that the function does not score it.
"""

from qarl.rewards.batch import RewardResult
from qarl.rewards.pool import RewardPool

__all__ = ["RewardPool", "RewardResult"]
