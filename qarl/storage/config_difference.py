"""Which keys of a configuration may differ between a run and its resumption, and which of the others do.

Imports no torch.
"""

from collections.abc import Iterator
from typing import Any

from qarl.config.by_device import ON_CPU
from qarl.inputs.json import flatten, short_json

# Changing these keys does not change a step that was already taken. `train.steps` extends a run (and stretches a linear
# or cosine schedule from there on). An evaluation uses random numbers of its own, so it does not affect the sampler.
# `distributed` changes the order of sums from there on, which history.json records. Every other key, thread counts,
# batch limits and paths included, can change bits of the result, so a change is refused.
RESUMABLE_KEYS = (
    "train.steps",
    "train.run_dir",
    "train.profile",
    "train.profile.",
    "checkpoint.",
    "logging.",
    "diagnostics.",
    "evaluation.",
    "distributed.",
    "model.verify_digests",
    "rollout.vllm.device",
    "rollout.vllm.data_parallel",
    "rollout.vllm.memory_frac",
    "rollout.vllm.timeout_s",
    "rollout.vllm.max_restarts",
    "rollout.async.device",
    "rollout.async.kept_versions",
    "rollout.async.timeout_s",
    "rollout.async.max_restarts",
)


def config_difference(theirs: Any, ours: Any) -> list[str]:
    """Return `key is X there, Y here` for each dotted key that must not differ but does.

    `RESUMABLE_KEYS` may differ. A size that is automatic here takes the stored value. Lists are compared by element.
    """
    return list(_differences(flatten(theirs), flatten(ours)))


def _differences(there: dict[str, Any], here: dict[str, Any]) -> Iterator[str]:
    for key in [*here, *(key for key in there if key not in here)]:
        theirs, ours = there.get(key), here.get(key)
        if (key in there, theirs) == (key in here, ours) or _may_differ(key) or (key in ON_CPU and ours is None):
            continue
        if theirs and ours and isinstance(theirs, list) and isinstance(ours, list):
            yield from _differences(flatten(dict(enumerate(theirs)), key), flatten(dict(enumerate(ours)), key))
        else:
            shown = [short_json(values[key]) if key in values else "not set" for values in (there, here)]
            yield f"{key} is {shown[0]} there, {shown[1]} here"


def _may_differ(key: str) -> bool:
    return any(key.startswith(allowed) if allowed.endswith(".") else key == allowed for allowed in RESUMABLE_KEYS)
