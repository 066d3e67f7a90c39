"""Reward functions, built-in and the user's own, run in worker processes under a time limit.

A reward function has TRL's signature, `f(completions, prompts, **columns) -> list[float]`: texts, the prompts they
answer, and one list a data column, all of one length; a column `completion_ids` has the completions' token ids.
"""

from qarl.rewards.batch import RewardResult
from qarl.rewards.pool import RewardPool

__all__ = ["RewardPool", "RewardResult"]
