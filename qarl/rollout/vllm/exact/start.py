"""The policy's forward and sampler in a vLLM that has started."""

from __future__ import annotations

from typing import Any

from qarl.rollout.vllm.exact.model import ExactModel, Forward
from qarl.rollout.vllm.exact.sampling import PolicySampler


def take_over(model_runner: Any) -> Forward:
    """Let vLLM's model runner draw with `PolicySampler`. Returns the forward of its model, an `ExactModel`."""
    model = model_runner.get_model()
    assert isinstance(model, ExactModel), f"vLLM runs {type(model).__name__}"
    model_runner.sampler = PolicySampler(model.policy)
    return model.policy
