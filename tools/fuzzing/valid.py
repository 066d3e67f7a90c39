"""What `qarl check` accepts must train: configurations drawn from the schema's own ranges, each trained for two steps.

Sizes are kept small so that a run takes a second; every other number may be anything that its range allows, the ends
included.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fuzzing.base import Base, lay_out
from fuzzing.case import Case, case_random
from fuzzing.configs import Key, place
from fuzzing.execute import execute
from fuzzing.series import Result, remove
from fuzzing.values import shown
from fuzzing.verdict import Verdict, judge

# Values for keys that multiply into time or memory, or whose range says too little.
SMALL: dict[str, tuple[Any, ...]] = {
    "rollout.n": (1, 2, 3, 4),
    "rollout.max_response_length": (1, 2, 7, 8, 33),
    "rollout.max_num_seqs": (None, 1, 2, 7, 64),
    "rollout.max_batched_tokens": (None, 1, 16, 100, 4096),
    "rollout.kv_cache_tokens": (None, 16, 102, 110, 1000),
    "train.prompts_per_step": (1, 2, 3, 4),
    "rollout.stop": ([], ["a"], ["\n", "ab"], ["x" * 50]),
    "rollout.stop_token_ids": ([], [5], [0, 258], [100_000]),
    "train.minibatch_size": (None, 1, 2, 3, 4, 8),
    "train.micro_batch_tokens": (None, 1, 30, 100, 16384),
    "train.epochs": (1, 2, 3),
    "train.logprob_chunk": (None, 1, 3, 128),
    "train.threads": (None, 1, 2),
    "train.max_skipped_steps": (0, 1, 2, 100),
    "data.max_prompt_length": (80, 96, 100),
    "data.max_rows": (None, 1, 2, 5),
    "data.system_prompt": (None, "", "Add.", "\ud83d\ude00" * 3),
    "data.prompt_template": (None, "{prompt}", "{prompt} =", "{answer}", "{prompt:>30}"),
    "data.columns": ({}, {"question": "prompt"}, {"x": "answer"}),
    "data.split": ("train",),
    "data.task": (
        {},
        {"size": 1},
        {"size": 3, "seed": 5},
        {"operations": ["*"]},
        {"min": 5, "max": 5},
        {"min": -3, "max": 3},
    ),
    "quant.ignore": (["lm_head"], [], ["re:.*mlp.*"], ["re:.*"], ["lm_head", "model.layers.0.self_attn.q_proj"]),
    "quant.group_size": (32, 64, -1, 128, 16),
    "model.max_length": (None, 102, 110, 512),
    "model.revision": (None,),
    "model.trust_remote_code": (False,),
    "reward.workers": (1, 2),
    "reward.timeout_s": (5.0, 60.0),
    "evaluation.samples": (1, 2, 3),
    "evaluation.every": (None, 1, 2),
    "evaluation.pass_at": (None, [1], [1, 2], [2]),
    "evaluation.max_response_length": (None, 1, 5, 20),
    "checkpoint.every": (1, 2, 50),
    "checkpoint.resume": ("auto", "never"),
    "logging.console": ("plain", "none", "rich"),
}
# What this machine, its network or the model decides, not the configuration; and what the case itself needs.
LEFT_OUT = (
    "model.path",
    "model.gguf_file",
    "model.device",
    "model.trust_remote_code",
    "model.routing",
    "rollout.engine",
    "rollout.vllm",
    "rollout.linear_kernels",
    "quant.kernels",
    "quant.backward",
    "diagnostics.backward_every",
    "diagnostics.routing_every",
    "logging.wandb",
    "logging.trackio",
    "train.run_dir",
    "train.steps",
    "data.source",
    "data.subset",
    "objective.path",
    "objective.kwargs",
    "objective.router",
    "reward.functions",
    "evaluation.tasks",
)
TASK = {
    "name": "sums",
    "data": {"source": "task:arithmetic", "task": {"size": 2}, "max_prompt_length": 64},
    "reward": [{"name": "exact"}],
}
REWARDS: tuple[dict[str, Any], ...] = (
    {"name": "length", "options": {"target": 4}},
    {"name": "exact"},
    {"name": "math"},
    {"name": "regex", "options": {"pattern": r"\d+"}},
    {"name": "format", "options": {"pattern": "a.*"}},
)


@cache
def schema_leaves() -> dict[Key, list[dict[str, Any]]]:
    """Keys of the configuration that hold no sections, and their JSON schema; those in `LEFT_OUT` excepted.

    A key of several objectives has a schema of each, with the objective's name as `x-name`.
    """
    from qarl.config import Config

    schema, found = Config.model_json_schema(), {}
    for path, node in _leaves(schema, schema, ()):
        if not ".".join(map(str, path)).startswith(LEFT_OUT):
            found.setdefault(path, []).append(node)
    return found


def _leaves(root: dict[str, Any], node: dict[str, Any], path: Key) -> Iterator[tuple[Key, dict[str, Any]]]:
    for name, child in node.get("properties", {}).items():
        parts = [_resolved(root, part) for part in (child, *child.get("anyOf", ()))]
        members = [_resolved(root, part) for target in parts for part in target.get("oneOf", ())]
        for member in members:
            for below, leaf in _leaves(root, member, (*path, name)):
                yield below, {**leaf, "x-name": member["properties"]["name"]["const"]}
        if "properties" in parts[0]:
            yield from _leaves(root, parts[0], (*path, name))
        elif not members:
            yield (*path, name), parts[0]


def _resolved(root: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    return root["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node


def draw(rng: random.Random, base: Base) -> tuple[str, dict[str, Any]]:
    """(what was changed, a configuration of two steps)."""
    data = base.config(train={"steps": 2}, data={"max_prompt_length": 96})  # tokens: only the tokenizer counts them
    changes = []
    if rng.random() < 0.25:
        data["evaluation"] = {"tasks": [TASK], "samples": 1}
        changes.append("evaluation")
    data["reward"]["functions"] = [{**rng.choice(REWARDS)} for _ in range(rng.choice((1, 1, 1, 2)))]
    if rng.random() < 0.15:
        weight = rng.choice((0.0, -1.0, 1e-30, 1e6, 1e30, 1e300))
        data["reward"]["functions"][0]["weight"] = weight
        changes.append(f"weight {weight:g}")
    for _ in range(rng.choice((1, 1, 2, 3, 5))):
        path = rng.choice(list(schema_leaves()))
        node = rng.choice(schema_leaves()[path])
        name = ".".join(map(str, path))
        value = rng.choice(SMALL[name]) if name in SMALL else _value(rng, node)
        place(data, path, value)
        if "x-name" in node:
            place(data, (*path[:-1], "name"), node["x-name"])
        if data.get("objective", {}).get("name") == "custom":
            data["objective"]["path"] = "objective.py:f"
        changes.append(f"{name} = {value!r}")
    return "; ".join(changes), data


def _value(rng: random.Random, node: dict[str, Any]) -> Any:
    """A value that the key's schema allows."""
    if "anyOf" in node:
        return _value(rng, node["anyOf"][int(rng.random() * len(node["anyOf"]))])
    if "enum" in node:
        return rng.choice(node["enum"])
    if "const" in node:
        return node["const"]
    kind = node.get("type")
    if kind == "boolean":
        return rng.random() < 0.5
    if kind in ("integer", "number"):
        return _number(rng, node, kind == "integer")
    if kind == "string":
        return rng.choice(("a", "x y", "\u00e9"))
    if kind == "array":
        if "prefixItems" in node:
            return [_value(rng, item) for item in node["prefixItems"]]
        return (
            [_value(rng, node["items"]) for _ in range(rng.choice((0, 1, 2)))]
            if "properties" not in node.get("items", {})
            else []
        )
    return None if kind == "null" else {}


def _number(rng: random.Random, node: dict[str, Any], whole: bool) -> int | float:
    low, high = node.get("minimum", node.get("exclusiveMinimum")), node.get("maximum", node.get("exclusiveMaximum"))
    if whole:
        bottom, top = int(low if low is not None else -1), int(high if high is not None else 2**31)
        bottom, top = bottom + ("exclusiveMinimum" in node), top - ("exclusiveMaximum" in node)
        return min(top, rng.choice((bottom, bottom + 1, bottom + 2, bottom + 5, top)))
    bottom, top = float(low if low is not None else -1.0), float(high if high is not None else 1e6)
    ends = [value for value, out in ((bottom, "exclusiveMinimum"), (top, "exclusiveMaximum")) if out not in node]
    between = bottom + (top - bottom) * rng.choice((1e-9, 1e-3, 0.1, 0.5, rng.random(), 1 - 1e-9))
    return rng.choice((*ends, between, between, bottom + min(1e-4, (top - bottom) / 2)))


def trained(seed: str, base: Base, root: Path, command: Callable[[Sequence[str]], object]) -> Iterator[Result]:
    """`check` of each configuration, and `train` of each that it accepts: the last of the two results, for ever."""
    number = 0
    while True:
        yield run_valid(seed, f"valid-{number}", base, root, command)
        number += 1


def run_valid(
    seed: str, name: str, base: Base, root: Path, command: Callable[[Sequence[str]], object], keep: bool = False
) -> Result:
    """One configuration. Refused by `train` after `check` took it is bad."""
    directory = root / f"{seed}-{name}"
    remove(directory)
    case = Case(name, directory)
    case.cwd.mkdir(parents=True)
    what, data = draw(case_random(seed, name), base)
    case.mutation = f"valid: {shown(what, 300)}"
    (case.cwd / "c.yaml").write_text(yaml.safe_dump(data))
    lay_out(base, case, "objective")
    case.argv = ["check", "c.yaml"]
    outcome = execute(case, command)
    verdict = judge(case, outcome)
    if verdict.status == "accepted":
        case.argv = ["train", "c.yaml"]
        outcome = execute(case, command)
        verdict = judge(case, outcome)
        if verdict.status == "refused":
            last = outcome.err.decode(errors="replace").splitlines()[-1]
            verdict = Verdict("bad", "untrainable", f"train: {last[:100]}", last)
    if not keep:
        remove(directory)
    return Result(case, outcome, verdict)
