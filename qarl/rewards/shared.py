"""Rewards that several ranks compute: each of the responses to its share of the prompts, and then all have them all."""

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
    """The rewards of this rank's rollouts, in order, with the same number of rollouts per prompt.

    prompts: of all ranks. among: of which ranks they are, see `Ranks.share`.
    """
    own = ranks.share(len(prompts), among)
    n = len(rollouts) // len(own) if own else 0
    asked = [prompts[i] for i in own for _ in range(n)]
    columns = {name: [prompt.columns[name] for prompt in asked] for name in prompts[0].columns}
    texts, ids = [rollout.text for rollout in rollouts], [rollout.token_ids for rollout in rollouts]
    if ranks.count == 1:
        return rewards.score(texts, [prompt.text for prompt in asked], columns, ids)
    # A rank without prompts does not know n, and has nothing to number.
    share = Share(own.start * n, len(prompts) * n)
    return rewards.score(texts, [prompt.text for prompt in asked], columns, ids, share)


def gather_results(own: RewardResult, ranks: Ranks, max_failed_frac: float, place: str = "") -> RewardResult:
    """The scores of all ranks' shares, in the order of ranks.

    Raises UserError, on all ranks, for a function that failed on more than `max_failed_frac` of all completions. place:
    what its line begins with.
    """
    if ranks.count == 1:
        return own
    found = RewardResult.joined([RewardResult(**one) for one in ranks.gather(asdict(own))])
    together(ranks, lambda: judge(found, max_failed_frac, place))  # the same everywhere; now all know that it is
    return found


def judge(result: RewardResult, max_failed_frac: float, place: str = "") -> None:
    """Raise UserError for a function that failed on more than `max_failed_frac` of all completions."""
    for label, count in result.failed.items():
        head = f"reward `{label}`: "
        said = [message.removeprefix(head) for message in result.messages if message.startswith(head)]
        require_few_failures(label, count, len(result.total), max_failed_frac, said[-1] if said else "", place)
