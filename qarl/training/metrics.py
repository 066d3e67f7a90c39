"""Metrics of a step. Names are part of the run directory's interface and carry their unit."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from qarl.batch.batch import CPU, Batch
from qarl.batch.observer import Observer, Phase
from qarl.diagnostics.error_tokens import error_token_metrics
from qarl.diagnostics.mismatch import mismatch_metrics
from qarl.distributed.ranks import Ranks
from qarl.rewards import RewardResult
from qarl.types import Rollout
from qarl.utils.averages import deviation, mean
from qarl.utils.threads import one_thread


class Clock(Observer):
    """Measures the wall time of each phase of a step, in seconds. The first phase begins at construction."""

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
        """Add the time since the last lap (or the start) to `phase`."""
        now = time.perf_counter()
        self.laps[phase] = self.laps.get(phase, 0.0) + now - self._last
        self._last = now

    def move(self, seconds: float, source: str, target: str) -> None:
        """Move `seconds` of the time counted as `source` to `target`."""
        self.laps[source] -= seconds
        self.laps[target] = self.laps.get(target, 0.0) + seconds

    def metrics(self, rollout_tokens: int | None, learner_tokens: int) -> dict[str, float]:
        """Return times and throughputs.

        Args:
            rollout_tokens: Number of tokens sampled in this step; None if the run samples none.
            learner_tokens: Number of tokens in the learner's forwards; see `Part.forward_tokens`.
        """
        named = {f"time/{phase}_s": seconds for phase, seconds in self.laps.items()}
        if rollout_tokens is not None:
            named["throughput/rollout_tokens_per_s"] = rollout_tokens / self.laps["rollout"]
        return {
            "time/step_s": time.perf_counter() - self._start,
            **named,
            "throughput/learner_tokens_per_s": learner_tokens / self.laps["learner"],
        }


def reward_metrics(scores: RewardResult) -> dict[str, float]:
    """Return mean and standard deviation of the total reward, the mean per function, and counts of failures and skips.

    A function's mean covers the responses that it scored and is omitted if it skipped all. `reward/LABEL_skipped` is
    present only if the function skipped a response.
    """
    metrics = {"reward/mean": mean(scores.total), "reward/std": deviation(scores.total)}
    if len(scores.by_function) > 1:
        for label, values in scores.by_function.items():
            if scored := [value for value in values if value is not None]:
                metrics[f"reward/{label}_mean"] = mean(scored)
    metrics |= {f"reward/{label}_skipped": float(count) for label, count in scores.skipped.items() if count}
    return metrics | {"reward/failed": float(sum(scores.failed.values()))}


def response_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """Return response lengths in tokens and the fraction of responses at the length limit."""
    lengths = [len(r.token_ids) for r in rollouts]
    return {
        "response/length_mean": mean(lengths),
        "response/length_max": float(max(lengths)),
        "response/truncated_frac": sum(r.finish_reason == "length" for r in rollouts) / len(rollouts),
    }


def truncation_bias_bound(rollouts: list[Rollout], scores: RewardResult, retained: float) -> float:
    """Bound the bias of the expected reward due to truncated sampling (DVP, proposition 5.5).

    The bound is 2 max |R| T (1 - alpha): the total variation between two distributions over trajectories of T steps is
    at most T times that of one step, which is the probability mass outside the kept set.

    Args:
        rollouts: Responses; T is the longest length.
        scores: Total rewards R.
        retained: alpha, the smallest probability of a kept set.

    Returns:
        The bound, in units of the reward.
    """
    longest = max(len(rollout.token_ids) for rollout in rollouts)
    return 2.0 * max(map(abs, scores.total)) * longest * (1.0 - retained)


def token_metrics(batch: Batch) -> dict[str, float]:
    """Return metrics of the sampled tokens.

    `mismatch/*` compares the learner at the rollout's weights with the sampler's log-probs. `error_tokens/*` counts
    repetitive or garbled stretches.
    """
    with one_thread():
        whole = batch.whole(CPU)
        ids = torch.tensor([token for response in batch.own_tokens for token in response])
        sampler, segments = whole.logp_sampler, whole.segments
        mismatch = mismatch_metrics(whole.logp_old, sampler, segments)
        return mismatch | error_token_metrics(ids, sampler, batch.advantages, segments)


# Metrics of each rank's sampler, and the function that combines the values of all ranks.
REDUCED: Mapping[str, Callable[[Sequence[float]], float]] = {
    "async/sampler_idle_frac": mean,
    "async/learner_idle_frac": mean,
    "async/restarts": sum,
    "publish/pause_s": max,
    "publish/canary_abs_mean": mean,
    "publish/canary_abs_max": max,
}


def over_ranks(metrics: Mapping[str, float], ranks: Ranks) -> dict[str, float]:
    """Return min, mean and max over ranks of the time and memory metrics, and throughput. A collective.

    Throughput uses the times of the slowest rank.

    Args:
        metrics: Metrics of this rank.
        ranks: All ranks of the run.

    Returns:
        `NAME_min`, `NAME_mean` and `NAME_max` for each `time/*` and `memory/*` that all ranks have, and one value for
        each name in `REDUCED`. Empty for a single rank.
    """
    if ranks.count == 1:
        return {}
    every = ranks.gather({name: value for name, value in metrics.items() if name.startswith(("time/", "memory/"))})
    found = spread(every)
    own = ranks.gather({name: metrics[name] for name in REDUCED if name in metrics})
    for name in dict.fromkeys(name for rank in own for name in rank):
        found[name] = REDUCED[name]([rank[name] for rank in own if name in rank])
    if asynchronous := "async/restarts" in metrics:
        found["throughput/rollout_tokens_per_s"] = sum(
            ranks.gather(metrics.get("throughput/rollout_tokens_per_s", 0.0))
        )
    for phase in ("learner",) if asynchronous else ("rollout", "learner"):
        name, time_s = f"throughput/{phase}_tokens_per_s", f"time/{phase}_s"
        if name in metrics:
            found[name] = metrics[name] * metrics[time_s] / found[f"{time_s}_max"]
    return found


def spread(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return `NAME_min`, `NAME_mean` and `NAME_max` of each number that all ranks have."""
    found: dict[str, float] = {}
    for name in ranks[0]:
        if all(name in rank for rank in ranks):
            values = [rank[name] for rank in ranks]
            found |= {f"{name}_min": min(values), f"{name}_mean": mean(values), f"{name}_max": max(values)}
    return found


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process in GiB: device memory on a GPU, resident memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    status = Path("/proc/self/status")  # not getrusage, whose peak survives exec and may be that of a large parent
    if status.exists():
        peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(peak.split()[1]) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
