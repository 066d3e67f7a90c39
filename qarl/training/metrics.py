"""A step's metrics from its parts, under the names of the run directory's interface. Units stand in the names."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qarl.diagnostics.error_tokens import error_token_metrics
from qarl.diagnostics.mismatch import mismatch_metrics
from qarl.distributed.ranks import Ranks
from qarl.rewards import RewardResult
from qarl.training.batch import CPU, Batch
from qarl.training.observer import Observer, Phase
from qarl.types import Prompt, Rollout
from qarl.utils.averages import deviation, mean
from qarl.utils.threads import one_thread


class Clock(Observer):
    """Wall time of a step's phases, in seconds; starts when it is made."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    @contextmanager
    def phase(self, name: Phase, responses: int | None) -> Iterator[None]:
        try:
            yield
        finally:
            self.lap(name)

    def lap(self, phase: str) -> None:
        """The time since the last lap (or the start) belongs to `phase`."""
        now = time.perf_counter()
        self.laps[phase] = self.laps.get(phase, 0.0) + now - self._last
        self._last = now

    def move(self, seconds: float, source: str, target: str) -> None:
        """Fraction of what was counted as `source` that belongs to `target`."""
        self.laps[source] -= seconds
        self.laps[target] = self.laps.get(target, 0.0) + seconds

    def metrics(self, rollout_tokens: int, learner_tokens: int) -> dict[str, float]:
        """rollout_tokens: sampled in this step. learner_tokens: run by the learner, see `Part.forward_tokens`."""
        named = {f"time/{phase}_s": seconds for phase, seconds in self.laps.items()}
        return {
            "time/step_s": time.perf_counter() - self._start,
            **named,
            "throughput/rollout_tokens_per_s": rollout_tokens / self.laps["rollout"],
            "throughput/learner_tokens_per_s": learner_tokens / self.laps["learner"],
        }


def reward_metrics(scores: RewardResult) -> dict[str, float]:
    """Mean and deviation of the total, the mean of each function, and the numbers of failed and skipped scores.

    A function's mean is over the responses that it scored, and missing if it skipped all. `reward/LABEL_skipped`
    is there if the function skipped any.
    """
    metrics = {"reward/mean": mean(scores.total), "reward/std": deviation(scores.total)}
    if len(scores.by_function) > 1:
        for label, values in scores.by_function.items():
            if scored := [value for value in values if value is not None]:
                metrics[f"reward/{label}_mean"] = mean(scored)
    metrics |= {f"reward/{label}_skipped": float(count) for label, count in scores.skipped.items() if count}
    return metrics | {"reward/failed": float(sum(scores.failed.values()))}


def response_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """Lengths in tokens, and the share that hit the length limit."""
    lengths = [len(r.token_ids) for r in rollouts]
    return {
        "response/length_mean": mean(lengths),
        "response/length_max": float(max(lengths)),
        "response/truncated_frac": sum(r.finish_reason == "length" for r in rollouts) / len(rollouts),
    }


def truncation_bias_bound(rollouts: list[Rollout], scores: RewardResult, retained: float) -> float:
    """Bound of what truncating the distribution does to the expected reward (DVP, proposition 5.5).

    2 max |R| T (1 - alpha): the total variation of two trajectory distributions of T steps is at most T times that of a
    step, which is the mass outside the kept set.

    Args:
        rollouts: T is the longest of them.
        scores: R, the total rewards.
        retained: alpha, the least probability of a kept set.
    """
    longest = max(len(rollout.token_ids) for rollout in rollouts)
    return 2.0 * max(map(abs, scores.total)) * longest * (1.0 - retained)


def token_metrics(batch: Batch) -> dict[str, float]:
    """What the sampled tokens show: `mismatch/*`, the learner at the rollout's snapshot against what the sampler
    reported, and `error_tokens/*`."""
    with one_thread():
        whole = batch.whole(CPU)
        ids = torch.tensor([token for response in batch.own_tokens for token in response])
        sampler, segments = whole.logp_sampler, whole.segments
        mismatch = mismatch_metrics(whole.logp_old, sampler, segments)
        return mismatch | error_token_metrics(ids, sampler, batch.advantages, segments)


def over_ranks(metrics: Mapping[str, float], ranks: Ranks) -> dict[str, float]:
    """NAME_min, NAME_mean and NAME_max over the ranks of each time and memory that all of them have, and throughput by
    the slowest rank's times; a collective. metrics: of this rank. Nothing on one rank.
    """
    if ranks.count == 1:
        return {}
    every = ranks.gather({name: value for name, value in metrics.items() if name.startswith(("time/", "memory/"))})
    found = spread(every)
    for phase in ("rollout", "learner"):
        name, time_s = f"throughput/{phase}_tokens_per_s", f"time/{phase}_s"
        found[name] = metrics[name] * metrics[time_s] / found[f"{time_s}_max"]
    return found


def spread(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """NAME_min, NAME_mean and NAME_max of each number that all ranks have."""
    found: dict[str, float] = {}
    for name in ranks[0]:
        if all(name in rank for rank in ranks):
            values = [rank[name] for rank in ranks]
            found |= {f"{name}_min": min(values), f"{name}_mean": mean(values), f"{name}_max": max(values)}
    return found


def peak_memory_gib(device: torch.device) -> float:
    """The most this process has held: device memory on a GPU, resident memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    status = Path("/proc/self/status")  # not getrusage: its peak survives exec, so a large parent's would show
    if status.exists():
        peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(peak.split()[1]) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def rollout_rows(
    prompts: list[Prompt], rollouts: list[Rollout], scores: RewardResult, batch: Batch
) -> list[dict[str, Any]]:
    """One record a response for rollouts/NNNNNN.jsonl."""
    by_id = {p.id: p for p in prompts}
    rows = []
    for i, rollout in enumerate(rollouts):
        gap = (batch.logp_old[i] - batch.logp_sampler[i]).abs()
        rows.append(
            {
                "prompt_id": rollout.prompt_id,
                "sample": rollout.sample,
                "version": rollout.version,
                "seed": rollout.seed,
                "prompt": by_id[rollout.prompt_id].text,
                "completion": rollout.text,
                "finish_reason": rollout.finish_reason,
                "reward": scores.total[i],
                "rewards": {label: values[i] for label, values in scores.by_function.items()},
                "advantage": float(batch.advantages[i]),
                "tokens": len(rollout.token_ids),
                "logp_sampler_mean": float(batch.logp_sampler[i].mean()),
                "logp_old_mean": float(batch.logp_old[i].mean()),
                "delta_abs_max": float(gap.max()),
            }
        )
    return rows


def rollout_tensors(batch: Batch, rewards: list[float], versions: list[list[int]] | None = None) -> dict[str, Tensor]:
    """The responses of a step for rollouts/NNNNNN.safetensors, R responses with T tokens together, in order.

    int32: prompt_lengths, response_lengths, groups (R), prompt_tokens, response_tokens (T), one after the other, a
    prompt once for each of its responses. float32: advantages, rewards (R); logp_sampler, logp_old and logp (T), of the
    learner's last training forward. If the policy did not write all tokens: written (T), uint8; the log-probs are then
    of the tokens that it wrote. version: int64 (1), of the policy when the step begins; if earlier versions sampled
    tokens, versions: int64 (T), of each. If the sampler reported its experts:
    routing, uint8 or int16 (N, L, k), each response's prompt + response - 1 rows after the other's (`Rollout.routing`).
    """
    whole = batch.whole(CPU)

    def integers(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32)

    extra = {} if batch.routing is None else {"routing": torch.cat(batch.routing)}
    if batch.written is not None:
        extra["written"] = torch.tensor([flag for response in batch.written for flag in response], dtype=torch.uint8)
    if versions is not None:
        extra["versions"] = torch.tensor([version for own in versions for version in own])
    return {
        **extra,
        "prompt_lengths": integers(len(prompt) for prompt in batch.prompts),
        "response_lengths": integers(len(response) for response in batch.responses),
        "prompt_tokens": integers(token for prompt in batch.prompts for token in prompt),
        "response_tokens": integers(token for response in batch.responses for token in response),
        "groups": integers(batch.groups),
        "logp_sampler": whole.logp_sampler,
        "logp_old": whole.logp_old,
        "logp": batch.logp.read(whole),
        "advantages": batch.advantages.float(),
        "rewards": torch.tensor(rewards, dtype=torch.float32),
        "version": torch.tensor([batch.version]),
    }
