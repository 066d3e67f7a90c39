"""The `objective` section: one of the registered objectives, chosen by its name."""

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import BeforeValidator

from qarl.inputs.section import Fault, Field, refusal
from qarl.objectives.base import DEFAULT, ObjectiveConfig, RatioObjective, RunConfig
from qarl.objectives.registry import BY_NAME, OBJECTIVES

# Group baselines: with one response per group, every advantage would be 0.
GROUP_ADVANTAGES = ("grpo", "grpo_no_std", "rloo")

_SHARED = set(ObjectiveConfig.model_fields)
_WITH_RATIO = [name for name, objective in BY_NAME.items() if issubclass(objective, RatioObjective)]
_WITHOUT_RATIO = [
    name
    for name, objective in BY_NAME.items()
    if name not in _WITH_RATIO and objective.own_ratio == "one" and objective.rewarded
]


def _chosen(data: Any) -> Any:
    """Normalize the section to the keys of the objective that it names.

    A string is the path of a custom objective. Nulls are dropped, also at keys of other objectives: resolved
    configurations of earlier versions had every key of every objective, with null for unused ones. For the same reason
    `ratio: train` is dropped if the objective has no such key.

    Raises:
        PydanticCustomError: There is no such objective, or a key belongs to another one.
    """
    if isinstance(data, str):
        if ":" not in data:
            known = data if data in BY_NAME else DEFAULT
            text = f"must be a mapping of keys, as {{name: {known}}}, or file.py:name of your own"
            raise refusal([Fault((), data, text)])
        return {"name": "custom", "path": data}
    if not isinstance(data, dict):
        return data
    name = data.get("name", DEFAULT)
    objective = BY_NAME.get(name) if isinstance(name, str) else None
    if objective is None:
        raise refusal([Fault(("name",), name, _no_such(name))])
    own, faults = objective.model_fields, []
    given: dict[str, Any] = {"name": name}
    for key, value in data.items():
        shared = any(key in other.model_fields for other in OBJECTIVES)
        if shared and (value is None or (key == "ratio" and value == "train" and key not in own)):
            continue
        if shared and key not in own:
            faults.append(Fault((key,), value, _of_others(key, name)))
        given[key] = value
    if faults:
        raise refusal(faults)
    return given


if TYPE_CHECKING:
    AnyObjective = ObjectiveConfig  # their base class
else:
    AnyObjective = Annotated[
        Union[OBJECTIVES],  # noqa: UP007 (a tuple of any length)
        Field(discriminator="name"),
        BeforeValidator(_chosen),
    ]


def objective_faults(config: RunConfig) -> Iterator[Fault]:
    """Invalid combinations of objective, correction and sampling parameters."""
    objective, correction = config.objective, config.correction
    yield from objective.faults_in(config)
    name, preset, wanted = objective.name, correction.preset, correction.expansion.ratio
    ratio = objective.ratio if isinstance(objective, RatioObjective) else None
    if wanted == "rollout" and name not in _WITH_RATIO:
        text = f"trains with objective.ratio rollout, which {name} does not read; use {', '.join(_WITH_RATIO)}"
        yield config.fault("correction.preset", text)
    elif wanted is not None and ratio not in (None, wanted):
        text = f"correction.preset {preset} uses ratio {wanted}; leave null, or write the correction out"
        yield config.fault("objective.ratio", text)
    elif (ratio or wanted) in ("rollout", "shadow") and correction.level != "none":
        text = (
            f"with objective.ratio {ratio or wanted} the ratio already contains the mismatch; correction.level must be"
        )
        yield config.fault(f"correction.{correction.weight_key}", f"{text} none (reject and veto may stay)")
    if objective.ratio_kind != "one":
        others = listed(_WITHOUT_RATIO, "or")
        if correction.expansion.policy_gradient:
            text = f"is for a policy gradient without a ratio, and {name} has one; use {others}"
            yield config.fault("correction.preset", text)
        elif correction.signal == "rollout" and correction.level != "none":
            text = f"the ratio of {name} already contains the learner's change; use corr, or {others}"
            yield config.fault("correction.signal", text)
    if objective.dvp_rho is not None and config.rollout.min_p not in (0.0, objective.dvp_rho):
        text = f"objective.dvp_rho = {objective.dvp_rho:g} is the sampler's min_p; leave 0, or the same"
        yield config.fault("rollout.min_p", text)
    if objective.dvp_outside is not None and not config.truncated:
        text = "has no effect without truncation (min_p, top_p, top_k); leave null, or set objective.dvp_rho"
        yield config.fault("objective.dvp_outside", text)
    if objective.truncation_set == "replay" and not config.ranked:
        text = "replays the sets of top-p and top-k; use own, or set rollout.top_p or rollout.top_k"
        yield config.fault("objective.truncation_set", text)


def resolved_objective(config: RunConfig) -> ObjectiveConfig:
    """Fill in the defaults that depend on other sections: ratio, aggregation, teacher.loss, and dvp_outside.

    If `dvp_rho` is combined with top-p or top-k, a token may leave the learner's set only because the learner's ranking
    moved, which is no evidence against the response. `dvp_outside` then defaults to `token`, as without `dvp_rho`.
    """
    objective, teacher = config.objective, config.objective.teacher
    found: dict[str, Any] = {}
    if teacher is not None and teacher.loss is None:
        loss = "forward_kl" if config.rollout.engine == "data" or teacher.top_k else "reverse_kl"
        found["teacher"] = teacher.model_copy(update={"loss": loss})
    if isinstance(objective, RatioObjective) and objective.ratio is None:
        found["ratio"] = config.correction.expansion.ratio or "train"
    aggregation = config.correction.expansion.aggregation
    if aggregation is not None and "aggregation" not in objective.model_fields_set:
        found["aggregation"] = aggregation
    if config.truncated and objective.dvp_outside is None:
        level = config.correction.level
        found["dvp_outside"] = "token" if config.ranked else objective.default_pruning(level)
    return objective.model_copy(update=found) if found else objective


def listed(names: list[str], last: str = "and") -> str:
    """`a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {last} {names[-1]}"


def _no_such(name: Any) -> str:
    if isinstance(name, str) and ":" in name:
        return "is not a built-in objective; for your own, set name: custom and path: file.py:name"
    near = difflib.get_close_matches(name, BY_NAME, n=1) if isinstance(name, str) else []
    text = f"must be {listed([repr(known) for known in BY_NAME], 'or')}"
    return f"{text}; did you mean {near[0]}?" if near else text


def _of_others(key: str, name: str) -> str:
    """Error text for a key that objective `name` does not have: which objectives have it."""
    readers = [other for other, objective in BY_NAME.items() if key in objective.model_fields]
    own = [own for own in BY_NAME[name].model_fields if own not in _SHARED]
    reads = f" ({name} reads {', '.join(own)})" if own else ""
    fix = f"leave null, or set objective.name: {readers[0]}" if len(readers) == 1 else "leave null"
    return f"is read by {listed(readers)}, not by {name}; {fix}{reads}"
