"""Warnings during training: responses or tokens without gradient, and clamped importance weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qarl.config import Config
from qarl.objectives.common import ESS, WEIGHT_MEAN
from qarl.objectives.correction import REJECTED, per_token
from qarl.objectives.objective import OUTSIDE, OUTSIDE_RESPONSES, Objective

MOST = 0.5  # a step that rejects more than this fraction counts toward a warning
IN_A_ROW = 10  # number of consecutive such steps before the warning
CLAMPED = "correction/clamped_frac"

# Largest fraction of a minibatch's responses or tokens that may lie outside the learner's truncated distribution and
# thus have weight 0. A tiny model at lr 1e-4 loses 0.2 to 0.6 % of its tokens with top-p 0.9 (below the limit) and 2 to
# 4 % with top-k 20 (above it). With `dvp_outside: response` the same 0.2 to 0.6 % drop 25 to 70 % of its responses.
OUTSIDE_LIMITS = {"response": (OUTSIDE_RESPONSES, 0.1), "token": (OUTSIDE, 0.01)}


class Alarms:
    """Warn once per cause, based on the metrics of each step.

    Causes:
        - Tokens outside the learner's truncated distribution drop more than 10 % of a minibatch's responses
          (`objective.dvp_outside: response`) or 1 % of its tokens (`token`).
        - A rejection rule, a veto, a mask, or the whole correction rejects more than half of the responses (or tokens)
          in ten consecutive steps.
        - Importance weights were clamped, because their exponent was outside +-20.

    Args:
        config: Configuration of the run.
        objective: The objective; its correction and pruning decide which metrics are watched.
        warn: Called with one line per warning.
    """

    def __init__(self, config: Config, objective: Objective, warn: Callable[[str], None]) -> None:
        self._warn, self._config, self._pruning = warn, config, objective.pruning
        self._watched = watched(config, objective)
        self._in_a_row = dict.fromkeys(self._watched, 0)
        self._reported: set[str] = set()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Check the metrics of one step.

        Args:
            step: Step number, counted from 1.
            metrics: Metrics of the step.
        """
        if self._config.truncated:
            self._outside(step, metrics)
        for name, what in self._watched.items():
            above = metrics.get(name, 0.0) > MOST
            self._in_a_row[name] = self._in_a_row[name] + 1 if above else 0
            # A warning about the whole correction is redundant after a warning about one of its parts.
            if self._in_a_row[name] < IN_A_ROW or (name == REJECTED and self._reported & self._watched.keys()):
                continue
            self._once(
                name,
                f"step {step}: {what} {metrics[name]:.2%} in this step, and more than half in each of the last "
                f"{IN_A_ROW} steps; little training signal remains",
            )
        if metrics.get(CLAMPED, 0.0) > 0.0:
            self._once(
                CLAMPED,
                f"step {step}: {metrics[CLAMPED]:.2%} of the importance weights had an exponent outside "
                "+-20 and were clamped (correction/clamped_frac)",
            )

    def _outside(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn if one minibatch of the step lost too much to tokens outside the learner's truncated distribution."""
        name, limit = OUTSIDE_LIMITS[self._pruning]
        share = metrics.get(f"{name}_max", 0.0)
        if share <= limit:
            return
        fix = loosen(self._config)
        if self._pruning == "response":
            text = "responses have weight 0, because they have a token outside the learner's truncated distribution"
            fix = f"set objective.dvp_outside: token, or {fix}"
        else:
            text = "tokens are outside the learner's truncated distribution and have weight 0"
            fix = f"{fix}, lower optim.lr, or raise train.minibatch_size"
        self._once(name, f"step {step}: in one minibatch {share:.2%} of the {text} (limit {limit:.0%}); {fix}")

    def _once(self, name: str, text: str) -> None:
        if name not in self._reported:
            self._reported.add(name)
            self._warn(text)


def watched(config: Config, objective: Objective) -> dict[str, str]:
    """Map each metric of the correction that rejects responses or tokens to the text of its warning."""
    correction, found = objective.correction, dict[str, str]()
    if correction is None:
        return found
    for rule in correction.reject or ():
        found[rule.metric] = f"the rule '{rule}' rejects {_unit(rule.per_token)}:"
    if correction.veto is not None:
        found["correction/veto_frac"] = f"the veto (a token below {correction.veto:g}) rejects responses:"
    also = " or a token outside the learner's set" if config.truncated else ""
    found[REJECTED] = f"the correction ({correction}){also} rejects {_unit(per_token(correction))}:"
    return found


def idle_correction(config: Config, objective: Objective, history: Sequence[Mapping[str, Any]]) -> str | None:
    """Report a correction that never rejected anything, or never changed anything, during a run.

    Args:
        config: Configuration of the run.
        objective: The objective with its correction.
        history: Metrics of all steps.

    Returns:
        One line, or None if the correction had an effect. Also None for objectives whose built-in weight rejects
        nothing (`tbpo`).
    """
    correction = objective.correction
    if correction is None or not history or not (config.correction.active or correction.mode == "mask"):
        return None
    if any(step.get(REJECTED, 0.0) != 0.0 for step in history):
        return None
    plain = all(step.get(WEIGHT_MEAN, 1.0) == 1.0 and step.get(ESS, 1.0) == 1.0 for step in history)
    if plain:
        return f"the correction ({correction}) changed nothing in {len(history)} steps: every weight was 1"
    rejects = correction.reject or correction.veto is not None or correction.mode == "mask"
    return f"the correction ({correction}) rejected nothing in {len(history)} steps" if rejects else None


def loosen(config: Config) -> str:
    """Suggest settings that prune fewer tokens, such as `raise rollout.top_p (0.9) or raise rollout.top_k (20)`."""
    rollout, rho = config.rollout, config.objective.dvp_rho
    replays = not config.ranked or config.objective.truncation_set == "replay"
    keys = [
        "" if replays else "set objective.truncation_set: replay",
        f"raise rollout.top_p ({rollout.top_p:g})" if rollout.top_p < 1 else "",
        f"raise rollout.top_k ({rollout.top_k})" if rollout.top_k else "",
        f"lower objective.dvp_rho ({rho:g})" if rho else "",
        f"lower rollout.min_p ({rollout.min_p:g})" if rollout.min_p and not rho else "",
    ]
    return " or ".join(key for key in keys if key)


def _unit(by_token: bool) -> str:
    return "tokens" if by_token else "responses"
