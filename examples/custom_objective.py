"""An objective of your own: CISPO (MiniMax-M1, 2025), which clips the weight of a token and keeps its gradient.

    J_t = stop(min(r_t, 1 + clip_ratio_high)) A l_t        l_t the learner's log-prob, r_t its ratio, A the advantage

PPO's clip takes the gradient of every token whose ratio left the bounds; here it keeps one, with a bounded weight.
Train with it, averaged over all tokens as in the paper:

    qarl train configs/quickstart.yaml \\
        'objective={name: custom, path: "examples/custom_objective.py:cispo", aggregation: token-mean}'

`objective.kwargs` are the keyword arguments: {clip_ratio_high: 0.5}. What the function gets and returns:

    inputs.log_ratio         (T,) log of the ratio that objective.ratio names, with gradient
    inputs.logps             log-probs of the T tokens, (T,) each: logp (with gradient), logp_old, logp_sampler, ...
    inputs.advantages        (R,) of the responses; inputs.token_advantages is (T,)
    inputs.segments          which token is of which of the R responses: sum, mean (T,) -> (R,), expand (R,) -> (T,)
    Surrogate(value, stats)  value (T,): what a token is worth, to maximize; stats: metrics, by stat and ratio_stats

The correction multiplies the value, `objective.aggregation` adds it up, and `objective.kl_coef` and `entropy_coef` add
their penalties, as for every objective.
"""

from __future__ import annotations

from qarl.objectives import Surrogate, SurrogateInputs, clamped_exp, ratio_stats, stat


def cispo(inputs: SurrogateInputs, clip_ratio_high: float = 0.28) -> Surrogate:
    """stop(min(r, 1 + clip_ratio_high)) A l per token."""
    ratio, clamped = clamped_exp(inputs.log_ratio.detach())  # exponents within +-20, and which were not
    weight = ratio.clamp(max=1.0 + clip_ratio_high)
    value = weight * inputs.token_advantages * inputs.logps.logp
    counted = inputs.counted_tokens  # what vocabulary pruning dropped is in no statistic
    stats = ratio_stats(ratio, ratio > weight, clamped, counted) | {"objective/weight_mean": stat(weight, counted)}
    return Surrogate(value, stats)
