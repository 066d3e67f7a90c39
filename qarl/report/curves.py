"""Charts of metrics: title, unit and curves. A metric without an entry gets its own chart."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Curves:
    r"""One chart. metrics: regular expression of the full name -> label, where `\1` refers to a group."""

    title: str
    unit: str
    metrics: Mapping[str, str]
    log_y: bool = False
    note: str = ""

    def labels(self, names: Iterable[str]) -> dict[str, str]:
        """Return the label of each metric of this chart; the first matching expression wins."""
        found: dict[str, str] = {}
        present = dict.fromkeys(names)
        for pattern, label in self.metrics.items():
            # Most patterns are literal names, and a run may have thousands of metrics.
            for name in present if "(" in pattern else {pattern} & present.keys():
                match = re.fullmatch(pattern, name)
                if match and name not in found:
                    found[name] = match.expand(label)
        return found


def _by_kind(title: str, unit: str, metric: str) -> Curves:
    """Return the chart of a statistic of end-of-sequence tokens and of the other tokens."""
    metrics = {f"precision/eos_{metric}": "end of sequence", f"precision/rest_{metric}": "other tokens"}
    return Curves(f"{title} at end-of-sequence and other tokens", unit, metrics)


REWARD = (
    Curves("Parts of the reward", "mean over the responses", {r"reward/(.+)_mean": r"\1"}),
    Curves("Failed scores", "scores per step", {"reward/failed": "failed"}),
    Curves("Skipped rows", "rows per step that a function returned None for", {r"reward/(.+)_skipped": r"\1"}),
    Curves("Response length", "tokens", {"response/length_mean": "mean", "response/length_max": "longest"}),
    Curves("Responses cut at the length limit", "fraction", {"response/truncated_frac": "truncated"}),
)
MISMATCH = (
    Curves(
        "Log-prob difference",
        "|delta| of a token (nats)",
        {"mismatch/delta_abs_mean": "mean", "mismatch/delta_abs_max": "largest"},
        log_y=True,
    ),
    Curves(
        "Quantiles of the log-prob difference",
        "|delta| of a token (nats)",
        {
            "mismatch/delta_abs_p50": "half of the tokens",
            "mismatch/delta_abs_p90": "90 %",
            "mismatch/delta_abs_p99": "99 %",
            "mismatch/delta_abs_p999": "99.9 %",
        },
        log_y=True,
        note="Fraction of tokens within each bound.",
    ),
    Curves("Divergence estimates", "nats per token", {"mismatch/k1": "k1", "mismatch/k3": "k3"}),
    Curves("Divergence inside both distributions", "k3 (nats per token)", {"mismatch/k3_inside": "k3"}),
    Curves(
        "Bias of the log-prob difference",
        "mean delta, learner - sampler (nats)",
        {
            "mismatch/tail_delta_mean": "tokens below probability 0.1",
            "mismatch/head_delta_mean": "tokens at or above probability 0.9",
        },
        note="Negative in the tail: the sampler samples tokens that it overestimates.",
    ),
    Curves(
        "Total variation distance",
        "of sampler and learner",
        {"mismatch/tv": "next token", "mismatch/tv_seq": "response"},
    ),
    Curves(
        "Perplexity of the responses",
        "exp of minus the mean log-prob",
        {"mismatch/ppl_learner": "learner", "mismatch/ppl_sampler": "sampler"},
    ),
    Curves("Perplexity ratio", "learner over sampler", {"mismatch/ppl_ratio": "ratio"}),
    Curves(
        "Chi-squared of the ratio",
        "no unit",
        {"mismatch/chi2_token": "token", "mismatch/chi2_seq": "sequence"},
        log_y=True,
    ),
    Curves(
        "Cap that balances bias and variance",
        "sqrt(2 (1 + chi-squared))",
        {"mismatch/optimal_cap_token": "token", "mismatch/optimal_cap_seq": "sequence"},
        log_y=True,
    ),
    Curves("Effective sample size of tokens", "fraction of the tokens", {"mismatch/ess_frac": "ess"}),
    Curves("Effective number of tokens", "tokens", {"mismatch/ess": "ess"}),
    Curves(
        "Probability difference",
        "learner's - sampler's, absolute",
        {
            "mismatch/rollout_probs_diff_mean": "mean",
            "mismatch/rollout_probs_diff_std": "standard deviation",
            "mismatch/rollout_probs_diff_max": "largest",
        },
        log_y=True,
    ),
    Curves(
        "Tokens outside a truncated distribution",
        "fraction",
        {
            "mismatch/outside_frac": "sampler's or learner's at the rollout",
            "policy/outside_frac": "learner's, now or at the rollout",
            "policy/outside_frac_max": "the same, worst minibatch",
        },
    ),
    Curves(
        "Responses with a token outside the learner's distribution",
        "fraction",
        {
            "policy/outside_responses_frac": "of the step",
            "policy/outside_responses_frac_max": "minibatch with the most",
        },
    ),
    Curves(
        "Responses with weight 0",
        "fraction",
        {
            "policy/zero_weight_responses_frac": "of the step",
            "policy/zero_weight_responses_frac_max": "minibatch with the most",
        },
    ),
    Curves(
        "Probability kept by truncation",
        "of the learner's distribution",
        {"policy/retained_mass_mean": "mean", "policy/retained_mass_min": "least"},
    ),
    Curves("Responses with a clamped exponent", "fraction", {"mismatch/clamped_frac": "clamped"}),
    Curves(
        "Experts that differ from the sampler's",
        "fraction",
        {
            "mismatch/routing_disagreement": "of (token, layer) pairs",
            "mismatch/routing_tokens": "of tokens, in any layer",
        },
    ),
)
POLICY = (
    Curves("Loss on given responses", "nats per token", {"sft/loss": "loss"}),
    Curves("Divergence from the teacher", "nats per token", {"teacher/divergence": "divergence"}),
    Curves("Same most likely token as the teacher", "fraction of tokens", {"teacher/top1_agreement": "agreement"}),
    Curves("Entropy", "nats per token", {"policy/entropy": "entropy"}),
    Curves("Gradient norm", "before clipping", {"policy/grad_norm": "norm"}),
    Curves("Weight of a token's score", "mean of W = min(r A, clip(r) A)", {"policy/mu_w": "W"}),
    Curves("Loss", "objective's own scale", {"policy/loss": "loss"}),
    Curves(
        "Clipped by the objective",
        "fraction",
        {
            "policy/clip_frac": "clipped",
            "policy/ratio_clamped_frac": "exponent clamped",
            "policy/kl_clamped_frac": "exponent of a KL clamped",
            "policy/kl_ref_clamped_frac": "of the KL to the reference",
        },
    ),
    Curves(
        "Dropped or clipped by the trust band",
        "fraction of responses",
        {
            "policy/tbpo_clipped_high_frac": "positive, ratio too high: clipped",
            "policy/tbpo_dropped_neg_low_frac": "negative, ratio too low: dropped",
            "policy/tbpo_dropped_neg_high_frac": "negative, ratio too high: dropped",
        },
    ),
    Curves(
        "KL from the rollout's policy: K3",
        "nats per token",
        {"policy/kl_k3": "learner at the rollout's weights", "policy/rollout_k3": "sampler"},
    ),
    Curves(
        "KL from the rollout's policy: K1",
        "nats per token",
        {"policy/kl_k1": "learner at the rollout's weights", "policy/rollout_k1": "sampler"},
    ),
    Curves("KL from the reference policy", "nats per token", {"policy/kl_ref": "KL"}),
    Curves(
        "Contribution against the rollout's learner",
        "mean of -(r - 1) A",
        {"policy/contribution_train_pos": "A > 0", "policy/contribution_train_neg": "A < 0"},
    ),
    Curves(
        "Contribution against the sampler",
        "mean of -(r - 1) A",
        {"policy/contribution_rollout_pos": "A > 0", "policy/contribution_rollout_neg": "A < 0"},
    ),
    Curves("Mean ratio", "policy now over policy of the rollout", {"policy/ratio_mean": "ratio"}),
    Curves(
        "Weights of the scores",
        "W = min(r A, clip(r) A)",
        {"policy/mu_w": "mean", "policy/w_negative_frac": "negative", "policy/w_imbalance": "positive over negative"},
    ),
    Curves(
        "Bound of the truncation bias",
        "reward",
        {"policy/truncation_bias_bound": "bound"},
        note="DVP, proposition 5.5: 2 max |R| T (1 - smallest retained mass), T: longest response.",
    ),
    Curves(
        "Groups sampled per step",
        "fraction of the groups sampled",
        {"sampling/equal_frac": "equal rewards", "sampling/surplus_frac": "surplus"},
    ),
    Curves("Responses without advantage", "fraction", {"policy/zero_advantage_frac": "advantage 0"}),
    Curves(
        "Router losses",
        "before their coefficients",
        {"router/aux_loss": "load balancing", "router/z_loss": "z-loss, mean of layers"},
    ),
    Curves("Largest load of an expert", "relative to uniform load", {"router/load_max": "largest"}),
    Curves("Router entropy", "nats per token", {"router/entropy": "entropy"}),
    Curves("Router-shift ratio", "mean before the floor", {"router/shift_mean": "ratio"}),
    Curves("Router-shift ratios below the floor", "fraction of tokens", {"router/shift_floored_frac": "below"}),
    Curves("Optimizer steps skipped", "gradient not finite, per step", {"policy/skipped_steps": "skipped"}),
    Curves("Learning rate", "no unit", {"optim/lr": "lr"}),
)
CORRECTION = (
    Curves(
        "Importance weight",
        "mean weight",
        {"correction/weight_mean": "weight", "correction/raw_ratio_mean": "ratio before truncation"},
    ),
    Curves("Effective sample size", "fraction", {"correction/ess": "ess"}),
    Curves(
        "Bias and variance of the bounded weight",
        "before rules and veto",
        {"correction/bias": "bias", "correction/variance": "variance"},
    ),
    Curves(
        "Rejected or clamped",
        "fraction",
        {
            "correction/rejected_frac": "rejected",
            "correction/clamped_frac": "exponent clamped",
            "correction/rule_clamped_frac": "exponent of a rule clamped",
        },
    ),
    Curves(
        "Responses dropped, by rule",
        "fraction of responses",
        {"correction/veto_frac": "veto", r"correction/reject_(.+)_frac": r"\1"},
    ),
)
ASYNC = (
    Curves("Staleness of the tokens", "steps", {"async/staleness_mean": "mean", "async/staleness_max": "largest"}),
    Curves(
        "Idle time",
        "fraction of the step",
        {"async/sampler_idle_frac": "sampler", "async/learner_idle_frac": "learner"},
    ),
    Curves("Groups completed before they were requested", "groups", {"async/queue_groups": "complete"}),
    Curves("Responses with tokens of several versions", "fraction", {"async/continued_frac": "continued"}),
    Curves("Groups cancelled by over-sampling", "fraction", {"async/cancelled_frac": "cancelled"}),
    Curves("Time without generation during a publish", "seconds", {"publish/pause_s": "pause"}),
    Curves("Restarts of the sampler so far", "restarts", {"async/restarts": "restarts"}),
)
QUANTIZATION = (
    Curves("Published values changed per step", "fraction", {"quant/codes_changed_frac": "changed"}),
    Curves(
        "Predicted steps until a published value changes",
        "optimizer steps",
        {"quant/crossing_steps": "half a step over the learning rate"},
    ),
    Curves(
        "Changed values that followed the clean gradient",
        "fraction of the changed values",
        {"quant/sign_agreement": "agree"},
    ),
    Curves("Number of published values changed per step", "values", {"quant/codes_changed_count": "changed"}),
)
PRECISION = (
    Curves(
        "Policy change and precision gap",
        "mean of a token, absolute (nats)",
        {"precision/alpha_abs_mean": "alpha: policy", "precision/beta_abs_mean": "beta: precision"},
        log_y=True,
    ),
    Curves(
        "Change over gap",
        "mean |alpha| over mean |beta|",
        {"precision/snr": "ratio"},
        note="Below 1, precision dominates the ratio.",
    ),
    Curves(
        "Clipped by policy change and by precision",
        "fraction of tokens",
        {
            "precision/clipped_frac": "the policy moved",
            "precision/phantom_frac": "phantom: precision alone",
            "precision/clipped_lost_frac": "policy change, gradient lost",
            "precision/phantom_lost_frac": "phantom, gradient lost",
        },
        note="Outside the clip bounds for either sign of the advantage; the gradient is lost on one side only.",
    ),
    _by_kind("Precision gap", "mean |beta| of a token (nats)", "beta_abs_mean"),
    _by_kind("Mean precision gap", "mean beta of a token (nats)", "beta_mean"),
    _by_kind("Policy change", "mean |alpha| of a token (nats)", "alpha_abs_mean"),
    _by_kind("Phantom clipping", "fraction of them", "phantom_frac"),
    _by_kind("Spread of the precision gap", "standard deviation of beta (nats)", "beta_std"),
    Curves(
        "Precision gap by log-prob",
        "mean |beta| of a token (nats)",
        {r"precision/beta_abs_logp_(.+)_(.+)": r"log-prob from -\1 to -\2"},
        log_y=True,
    ),
    Curves("Tokens that end a response", "fraction of tokens", {"precision/eos_frac": "ends"}),
    Curves("Advantage added by precision", "mean of beta A", {"precision/beta_advantage_mean": "beta A"}),
    Curves(
        "Ratios changed by precision",
        "fraction of tokens",
        {"precision/ratio_off_10_frac": "by more than 10 %", "precision/ratio_off_50_frac": "more than 50 %"},
    ),
    Curves("Largest precision gap", "|beta| of a token (nats)", {"precision/beta_abs_max": "largest"}, log_y=True),
    Curves(
        "Precision gap, mean and spread",
        "beta of a token (nats)",
        {"precision/beta_mean": "mean", "precision/beta_std": "standard deviation"},
    ),
    Curves("Precision gap and advantage", "correlation", {"precision/beta_advantage_corr": "beta with A"}),
    Curves(
        "Tokens outside a truncated distribution, shadow too",
        "fraction",
        {
            "precision/outside_frac": "learner's, shadow's or sampler's",
            "deployed/outside_frac": "shadow's, before or after the step",
        },
    ),
    Curves(
        "Improvement of the served policy",
        "nats per token, along the sign of A",
        {"deployed/improvement": "per training step", "deployed/improvement_per_update": "per optimizer step"},
    ),
    Curves("Change of the served policy", "nats per token, absolute", {"deployed/delta_abs_mean": "mean"}),
    Curves("Efficiency of a step", "improvement over movement", {"deployed/efficiency": "efficiency"}),
    Curves(
        "Errors of the gradient",
        "norm over the clean gradient's",
        {
            "gradients/ratio_rel": "through the ratio",
            "gradients/score_rel": "through the score",
            "gradients/interaction_rel": "of both together",
            "gradients/total_rel": "whole",
            "gradients/clip_rel": "through clipping",
            "gradients/clipped_rel": "whole, with clipping",
            "gradients/trained_rel": "as trained, against REINFORCE",
        },
    ),
    Curves(
        "Directions of the gradient and its errors",
        "cosine",
        {
            "gradients/cos_total": "gradient and clean gradient",
            "gradients/cos_clipped": "clipped gradient and clean gradient",
            "gradients/cos_trained": "trained gradient and REINFORCE",
            "gradients/cos_ratio_clean": "ratio error and clean",
            "gradients/cos_score_clean": "score error and clean",
            "gradients/cos_ratio_score": "ratio error and score error",
        },
    ),
    Curves(
        "Gradient of an FP8 backward",
        "cosine with that of a 16-bit one",
        {"backward/cosine": "whole", "backward/cosine_min": "worst linear layer"},
    ),
    Curves("Error of an FP8 backward", "norm over the gradient's", {"backward/relative_error": "whole"}),
)
ERROR_TOKENS = (
    Curves(
        "Tokens in repetitive or garbled stretches",
        "fraction of tokens",
        {
            "error_tokens/frac": "either",
            "error_tokens/repetitive_frac": "repetitive",
            "error_tokens/garbled_frac": "garbled",
        },
    ),
    Curves(
        "Error tokens by sign of the advantage",
        "fraction of tokens with that sign",
        {"error_tokens/positive_frac": "A > 0", "error_tokens/negative_frac": "A < 0"},
    ),
    Curves("Responses with an error stretch", "fraction", {"error_tokens/responses_frac": "responses"}),
)
COST = (
    Curves("Step time by phase", "seconds", {"time/step_s": "whole step", r"time/(.+)_s": r"\1"}),
    Curves(
        "Throughput",
        "tokens per second",
        {"throughput/rollout_tokens_per_s": "rollout", "throughput/learner_tokens_per_s": "learner"},
    ),
    Curves("Peak memory", "GiB, peak so far", {"memory/peak_gib": "peak"}),
)
# Metrics without their own chart: those of the reward chart, the step and the policy version.
ELSEWHERE = ("step", "reward/mean", "reward/std", "policy/version")
GROUPS = {  # title of the section -> charts
    "Reward and responses": REWARD,
    "Mismatch between sampler and learner": MISMATCH,
    "Policy": POLICY,
    "Correction": CORRECTION,
    "Asynchronous rollouts": ASYNC,
    "Quantization": QUANTIZATION,
    "Precision of learner and sampler": PRECISION,
    "Error tokens": ERROR_TOKENS,
    "Cost": COST,
}


def meaning(name: str) -> str:
    """Return title, label and unit of a metric's chart; empty if no chart has it."""
    for group in GROUPS.values():
        for curves in group:
            label = curves.labels([name]).get(name)
            if label is not None:
                return f"{curves.title}: {label} ({curves.unit})"
    return ""
