"""Helpers for the tests of the probe and of its gradients."""

import torch
from tiny_runs import Parts, live

from qarl.batch.batch import Batch

QUANTIZED_ROLLOUT = {"quant": {"scheme": "w8a8", "group_size": None, "learner": "full_precision"}}


def mostly_live(run: Parts, seed: int = 1) -> Batch:
    """Like `live`, but one response has advantage 0."""
    batch = live(run, seed)
    batch.advantages[3] = 0.0
    return batch


def packed(values) -> torch.Tensor:
    return torch.cat(list(values))


def shadow(run: Parts, batch: Batch) -> torch.Tensor:
    return run.policy.frozen_logprobs(run.policy.shadow, batch.prompts, batch.responses, run.sampling.truncation, 128)
