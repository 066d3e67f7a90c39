"""What a run says out loud while it trains: corrections that leave little to learn from, and bounds that were met."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict

from qarl.config import Config
from qarl.objectives import Objective
from qarl.objectives.correction.config import RejectRule

MOST = 0.5
IN_A_ROW = 10
REJECTED = "correction/rejected_frac"
CLAMPED = "correction/clamped_frac"


class Alarms:
    """Warns once of each thing, from the metrics of a run's steps.

    A rule, a veto, a mask, all of a correction together, or vocabulary pruning that takes more than half of the
    responses (or tokens) in ten steps in a row; and importance weights whose exponent was clamped to +-20, so that they
    are not what their ratio says.
    """

    def __init__(self, config: Config, objective: Objective, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._watched = watched(config, objective)
        self._in_a_row = dict.fromkeys(self._watched, 0)
        self._said: set[str] = set()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """step: counted from 1. metrics: of the step."""
        for name, what in self._watched.items():
            above = metrics.get(name, 0.0) > MOST
            self._in_a_row[name] = self._in_a_row[name] + 1 if above else 0
            # The whole says nothing where one of its parts has spoken.
            if self._in_a_row[name] < IN_A_ROW or (name == REJECTED and self._said - {CLAMPED}):
                continue
            self._once(
                name,
                f"step {step}: {what} {metrics[name]:.2%} here, and more than half in each of the last "
                f"{IN_A_ROW} steps; what is left teaches little",
            )
        if metrics.get(CLAMPED, 0.0) > 0.0:
            self._once(
                CLAMPED,
                f"step {step}: {metrics[CLAMPED]:.2%} of the importance weights had an exponent beyond "
                "+-20, and were made with 20 (correction/clamped_frac)",
            )

    def _once(self, name: str, text: str) -> None:
        if name not in self._said:
            self._said.add(name)
            self._warn(text)


def watched(config: Config, objective: Objective) -> dict[str, str]:
    """Metric -> what it says, of everything that may take responses or tokens from the training."""
    correction, found = objective.correction, {}
    for rule in correction.rejections:
        found[rule.metric] = f"the rule '{RejectRule(**asdict(rule))}' rejects {_unit(rule.per_token)}:"
    if correction.veto is not None:
        found["correction/veto_frac"] = f"the veto (a token below {correction.veto:g}) rejects responses:"
    if config.truncated and objective.pruning == "response":
        found["policy/outside_responses_frac"] = "a token outside the learner's set drops responses:"
    if not correction.empty:
        found[REJECTED] = f"the correction ({config.correction}) rejects {_unit(correction.per_token)}:"
    return found


def _unit(per_token: bool) -> str:
    return "tokens" if per_token else "responses"
