"""Reward functions, built-in and the user's own, run in worker processes under a time limit.

A reward function has TRL's signature, `f(completions, prompts, **columns) -> list[float]`: texts, the prompts they
answer, and one list a data column, all of one length.
"""

from qarl.rewards.pool import RewardPool, RewardResult

__all__ = ["RewardPool", "RewardResult"]
