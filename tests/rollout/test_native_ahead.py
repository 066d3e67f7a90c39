"""Steps that run ahead of the host, on layers of Triton kernels: on a GPU if there is one, else in the interpreter.

`test_native_steps.py` has what these steps are given; here are the bits that come of it.
"""

from __future__ import annotations

import pytest
import torch
from qarl_formats.registry import make_scheme
from qarl_kernels.launch import INTERPRETED
from qarl_kernels.logprob import Truncation

from qarl.config import ModelConfig, QuantConfig, RolloutConfig
from qarl.policy.load import load_model
from qarl.policy.policy import Policy
from qarl.rollout.engine import SamplingParams
from qarl.rollout.native.engine import NativeEngine
from qarl.types import Prompt

pytestmark = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device, or TRITON_INTERPRET=1"
)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def policy(tiny_model) -> Policy:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qarl.policy.policy.use_kernels", lambda *_: True)
        model = load_model(ModelConfig(path=str(tiny_model("qwen3", num_hidden_layers=1))))
        return Policy(model, make_scheme("bf16"), QuantConfig(scheme="bf16"), torch.bfloat16, DEVICE)


def test_sampler_and_learner_logprobs_are_equal(policy, tokenizer) -> None:
    """Decodes that cross into a second page, a second step of one size, and a prefill beside a decode."""
    prompts = [Prompt(i, [3 + (31 * i + 7 * j) % 256 for j in range(n)], "", {}) for i, n in enumerate([63, 2])]
    engine = NativeEngine(policy.sampler, tokenizer, RolloutConfig(max_batched_tokens=63))
    engine.publish(policy.current)
    rollouts = engine.generate(prompts, SamplingParams(1, 3, 4), 0)
    with torch.no_grad():
        learned = policy.logprobs([p.token_ids for p in prompts], [r.token_ids for r in rollouts], Truncation(), 128)[0]
    assert torch.equal(learned.cpu(), torch.tensor([value for r in rollouts for value in r.logprobs]))
