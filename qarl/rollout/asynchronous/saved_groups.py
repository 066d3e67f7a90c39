"""Groups in flight in a checkpoint: their responses, their orders, and the configuration they were sampled with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from qarl.config import Config
from qarl.distributed.ranks import Ranks
from qarl.errors import UserError
from qarl.rewards.frames import pack
from qarl.rollout.asynchronous.groups import Added, OrderLog, PendingGroup, Published, Wave
from qarl.types import Prompt

# Keys of `rollout` and `rollout.async` that must not change while a checkpoint has groups that were sampled ahead.
SAMPLED_WITH = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "max_response_length",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "dynamic_sampling",
)
QUEUED_WITH = "max_staleness", "publish_every", "in_flight", "order", "oversample", "proximal"
SHARED = "tokens", "logprobs"  # tensors that a checkpoint has once, concatenated over the ranks


def sampled_with(config: Config) -> dict[str, Any]:
    """Return the settings that determine the responses, the number and the age of the waiting groups, by key."""
    assert config.rollout.asynchronous is not None, "the run samples asynchronously"
    rollout, ahead = (part.model_dump(mode="json") for part in (config.rollout, config.rollout.asynchronous))
    return (
        {f"rollout.{key}": rollout[key] for key in SAMPLED_WITH}
        | {f"rollout.async.{key}": ahead[key] for key in QUEUED_WITH}
        | {"rollout.min_p": config.min_p, "train.prompts_per_step": config.train.prompts_per_step}
    )


def changed_key(config: Config, state: dict[str, Any]) -> str:
    """Return "KEY: SAVED VALUE" of the first setting that differs from the run that saved `state`; "" if none does.

    Checkpoints of earlier versions have only `rollout.n`.
    """
    own, before = sampled_with(config), {"rollout.n": state["n"], **state.get("sampled_with", {})}
    return next((f"{key}: {json.dumps(value)}" for key, value in before.items() if own.get(key) != value), "")


def save_groups(groups: Iterable[PendingGroup]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return tensors by name, and one JSON row per group, for `load_groups`.

    The tensors `tokens` (T,) int64 and `logprobs` (T,) float64 are concatenated over all responses, finished and
    unfinished, in the order of the JSON. `routing/GROUP/SAMPLE` is the `Rollout.routing` of a response.
    """
    tokens: list[int] = []
    logprobs: list[float] = []
    tensors: dict[str, Tensor] = {}
    rows = []
    for group in groups:
        responses: list[dict[str, Any]] = []
        for sample, r in sorted(group.rollouts.items()):
            tokens += r.token_ids
            logprobs += r.logprobs
            runs = run_lengths(r.token_versions)
            responses.append({"sample": sample, "reason": r.finish_reason, "text": r.text, "versions": runs})
            if r.routing is not None:
                tensors[f"routing/{group.number}/{sample}"] = r.routing
        for sample, (own, values, versions) in sorted(group.partial.items()):
            tokens += own
            logprobs += values
            responses.append({"sample": sample, "reason": None, "text": "", "versions": run_lengths(versions)})
        row: dict[str, Any] = {
            "number": group.number,
            "step": group.step,
            "submitted": group.submitted,
            "prompt": group.prompt.id,
        }
        row["prompt_sha256"] = prompt_digest(group.prompt)
        if group.wave is not None:
            row["wave"] = [group.wave.number, group.wave.needed]
        if group.rank:
            row["rank"] = group.rank
        rows.append({**row, "seed": group.seed, "first": group.first, "responses": responses})
    tensors["tokens"] = torch.tensor(tokens, dtype=torch.int64)
    tensors["logprobs"] = torch.tensor(logprobs, dtype=torch.float64)
    return tensors, rows


def run_lengths(values: Iterable[int]) -> list[list[int]]:
    """Return [value, count] of each run of equal values."""
    return [[value, sum(1 for _ in run)] for value, run in groupby(values)]


def load_groups(
    tensors: Mapping[str, Tensor], rows: list[dict[str, Any]], prompts: Mapping[int, Prompt], n: int, ranks: Ranks
) -> list[PendingGroup]:
    """Return the groups that `save_groups` saved, by number. The groups of other ranks have no responses.

    Args:
        tensors: Tensors of all ranks.
        rows: JSON of all ranks.
        prompts: The data's prompts by id.
        n: Number of responses per prompt.
        ranks: Ranks of the run, which may be more or fewer than the ranks that saved the groups.

    Raises:
        UserError: The tensors do not match the rows, or the data does not have one of the prompts any more.
    """
    ids, values = tensors["tokens"].tolist(), tensors["logprobs"].tolist()
    groups, waves, at = [], dict[int, Wave](), 0
    for row in rows:
        prompt = _saved_prompt(prompts, row["prompt"], row.get("prompt_sha256"))
        own = row["step"], row["submitted"], prompt, row["seed"], row["first"], n, row.get("rank", 0)
        group = PendingGroup(row["number"], *own)
        if (wave := row.get("wave")) is not None:
            group.wave = waves.setdefault(wave[0], Wave(*wave))
        for response in row["responses"]:
            versions = [version for version, count in response["versions"] for _ in range(count)]
            span = slice(at, at + len(versions))
            at = span.stop
            tokens, logprobs, sample = ids[span], values[span], response["sample"]
            if response["reason"] is None:
                group.partial[sample] = tokens, logprobs, versions
                continue
            group.finish(sample, tokens, logprobs, response["reason"], response["text"], versions, None)
            if (routing := tensors.get(f"routing/{group.number}/{sample}")) is not None:
                object.__setattr__(group.rollouts[sample], "routing", routing)
        groups.append(group)
    if at != len(ids) or at != len(values):
        raise UserError("rollout.async: the saved tokens do not match the list of saved responses")
    for group in groups:
        group.rank %= ranks.count
        if group.rank != ranks.rank:
            group.rollouts, group.partial = {}, {}
    return sorted(groups, key=lambda group: group.number)


def _saved_prompt(prompts: Mapping[int, Prompt], number: int, digest: str | None) -> Prompt:
    """Return the prompt of a saved group. digest: None in checkpoints of earlier versions."""
    prompt = prompts.get(number)
    if prompt is None or digest not in (None, prompt_digest(prompt)):
        what = "is not in the data" if prompt is None else "changed"
        raise UserError(f"rollout.async: prompt {number} of a saved response {what}; restore the data")
    return prompt


def prompt_digest(prompt: Prompt) -> str:
    """Return the SHA-256 (hex) of the parts of a prompt that its responses and scores depend on."""
    return hashlib.sha256(json.dumps([prompt.token_ids, prompt.text, pack(prompt.columns)]).encode()).hexdigest()


def save_log(log: OrderLog) -> list[list[Any]]:
    """Return a log as JSON: `publish` and a version, or `add` and numbers of groups."""
    return [
        ["publish", entry.version] if isinstance(entry, Published) else ["add", [g.number for g in entry.groups]]
        for entry in log.entries
    ]


def load_log(rows: list[list[Any]], groups: Iterable[PendingGroup]) -> OrderLog:
    """Return the log that `save_log` saved, without orders for groups other than these."""
    log, by_number = OrderLog(), {group.number: group for group in groups}
    for operation, what in rows:
        if operation == "add":
            log.append(Added([by_number[number] for number in what if number in by_number]))
        else:
            log.append(Published(what, []))
    return log


def merged_logs(logs: list[list[list[Any]]]) -> list[list[Any]]:
    """Merge the saved order logs of all ranks, which have different groups and were pruned differently."""
    if len(logs) == 1:
        return logs[0]
    added: dict[int, list[int]] = {}  # group numbers by the version published before them
    for log in logs:
        for operation, what in log:
            if operation == "publish":
                groups = added.setdefault(what, [])
            else:
                groups += what
    merged: list[list[Any]] = []
    for version in sorted(added):
        merged.append(["publish", version])
        if added[version]:
            merged.append(["add", sorted(added[version])])
    return merged


def gather_saved(
    tensors: dict[str, Tensor], rows: list[dict[str, Any]], log: list[list[Any]], ranks: Ranks
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Gather what `save_groups` and `save_log` returned on each rank. A collective.

    Returns:
        This rank's tensors, on the first rank with the `SHARED` tensors of all ranks; and the JSON of all ranks.
    """
    parts = {name: ranks.gather_tensors(tensors[name]) for name in SHARED}
    own = {name: tensor for name, tensor in tensors.items() if name not in SHARED}
    if ranks.first:
        own |= {name: torch.cat(each) for name, each in parts.items()}
    groups = [row for every in ranks.gather(rows) for row in every]
    return own, {"groups": groups, "log": merged_logs(ranks.gather(log))}
