"""A step's metrics from its parts, under the names of the run directory's interface. Units stand in the names."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from qarl_formats.quantize import codes_changed

from qarl.publish.snapshot import Snapshot
from qarl.rewards import RewardResult
from qarl.training.batch import Batch
from qarl.types import Prompt, Rollout


class Clock:
    """Wall time of a step's phases, in seconds."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """The time since the last lap (or the start) belongs to `phase`."""
        now = time.perf_counter()
        self.laps[phase] = self.laps.get(phase, 0.0) + now - self._last
        self._last = now

    def metrics(self, rollout_tokens: int, learner_tokens: float) -> dict[str, float]:
        """rollout_tokens: sampled in this step. learner_tokens: run by the learner, see `Batch.forward_tokens`."""
        named = {f"time/{phase}_s": seconds for phase, seconds in self.laps.items()}
        return {
            "time/step_s": time.perf_counter() - self._start,
            **named,
            "throughput/rollout_tokens_per_s": rollout_tokens / self.laps["rollout"],
            "throughput/learner_tokens_per_s": learner_tokens / self.laps["learner"],
        }


def reward_metrics(scores: RewardResult) -> dict[str, float]:
    """Mean and spread of the total, the mean of each function, and how many scores failed."""
    metrics = {"reward/mean": statistics.fmean(scores.total), "reward/std": statistics.pstdev(scores.total)}
    if len(scores.by_function) > 1:
        metrics |= {f"reward/{label}_mean": statistics.fmean(values) for label, values in scores.by_function.items()}
    return metrics | {"reward/failed": float(sum(scores.failed.values()))}


def response_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """Lengths in tokens, and the share that hit the length limit."""
    lengths = [len(r.token_ids) for r in rollouts]
    return {
        "response/length_mean": statistics.fmean(lengths),
        "response/length_max": float(max(lengths)),
        "response/truncated_frac": sum(r.finish_reason == "length" for r in rollouts) / len(rollouts),
    }


def changed_codes(before: Snapshot, after: Snapshot) -> dict[str, float]:
    """The share of low-bit codes that one step changed; nothing for unquantized policies."""
    if not after.weights:
        return {}
    counts = [codes_changed(before.weights[name], weight) for name, weight in after.weights.items()]
    return {"quant/codes_changed_frac": sum(changed for changed, _ in counts) / sum(total for _, total in counts)}


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
