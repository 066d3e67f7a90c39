"""The policy's forward and sampler in a vLLM that is starting."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qarl.rollout.vllm.exact.model import ExactModel, Forward
from qarl.rollout.vllm.exact.sampling import PolicySampler


def forward_of(model_runner: Any) -> Forward:
    """The policy's forward in vLLM's model runner, whose model is an `ExactModel`."""
    model = model_runner.get_model()
    assert isinstance(model, ExactModel), f"vLLM runs {type(model).__name__}"
    return model.policy


def take_over(model_runner: Any) -> None:
    """Let vLLM's model runner draw with `PolicySampler`, where it measures memory too.

    There vLLM would draw by top-k and top-p, with a kernel that takes seconds to compile and serves nothing here.
    """
    policy = forward_of(model_runner)
    sampler = PolicySampler(policy)

    @torch.inference_mode()
    def dummy_sampler_run(hidden_states: Tensor) -> Tensor:
        logits = policy.logits(torch.rand_like(hidden_states))
        noise = {row: torch.Generator(logits.device).manual_seed(row) for row in range(len(logits))}
        return sampler.draw(logits, noise).sampled_token_ids

    model_runner.sampler, model_runner._dummy_sampler_run = sampler, dummy_sampler_run
