"""Reward computation shared by several ranks: each scores its own responses, then all gather all scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from qarl.distributed.ranks import Ranks
from qarl.distributed.together import together
from qarl.rewards.batch import RewardResult, Share, require_few_failures
from qarl.rewards.pool import RewardPool
from qarl.types import Prompt, Rollout


def score_share(
    rewards: RewardPool,
    prompts: Sequence[Prompt],
    rollouts: Sequence[Rollout],
    ranks: Ranks,
    among: range | None = None,
) -> RewardResult:
    """Score this rank's rollouts.

    Args:
        rewards: The reward pool.
        prompts: Prompts of all ranks.
        rollouts: This rank's rollouts, the same number per prompt, in order.
        ranks: All ranks of the run.
        among: Ranks that have rollouts, see `Ranks.share`.
    """
    own = ranks.share(len(prompts), among)
    n = len(rollouts) // len(own) if own else 0
    # A rank without prompts does not know n and has no completions to number.
    share = None if ranks.count == 1 else Share(own.start * n, len(prompts) * n)
    return score_rollouts(rewards, [prompts[i] for i in own for _ in range(n)], rollouts, share)


def score_rollouts(
    rewards: RewardPool, prompts: Sequence[Prompt], rollouts: Sequence[Rollout], share: Share | None = None
) -> RewardResult:
    """Score rollouts. prompts: One per rollout. share: See `RewardPool.score`."""
    texts, ids = [rollout.text for rollout in rollouts], [rollout.token_ids for rollout in rollouts]
    columns = {name: [prompt.columns[name] for prompt in prompts] for name in (prompts[0].columns if prompts else ())}
    return rewards.score(texts, [prompt.text for prompt in prompts], columns, ids, share)


def gather_results(own: RewardResult, ranks: Ranks, max_failed_frac: float, place: str = "") -> RewardResult:
    """Concatenate the scores of all ranks, in rank order. A collective.

    Args:
        own: Scores of this rank.
        ranks: All ranks of the run.
        max_failed_frac: Largest fraction of completions that a function may fail on.
        place: Prefix of the error.

    Raises:
        UserError: On all ranks, if a function failed on too many completions.
    """
    if ranks.count == 1:
        return own
    found = RewardResult.joined([RewardResult(**one) for one in ranks.gather(asdict(own))])
    # Deterministic, but `together` propagates the error to all ranks.
    together(ranks, lambda: judge(found, max_failed_frac, place))
    return found


def judge(result: RewardResult, max_failed_frac: float, place: str = "") -> None:
    """Check that no function failed on more than `max_failed_frac` of all completions.

    Raises:
        UserError: A function did.
    """
    for label, count in result.failed.items():
        head = f"reward `{label}`: "
        messages = [message.removeprefix(head) for message in result.messages if message.startswith(head)]
        require_few_failures(label, count, len(result.total), max_failed_frac, messages[-1] if messages else "", place)
