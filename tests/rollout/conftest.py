"""Policies and engines on the tiny models."""

from collections.abc import Callable

import policy_models
import pytest
import torch
from qarl_kernels.launch import INTERPRETED

from qarl.config import ModelConfig, RolloutConfig
from qarl.policy.load import load_tokenizer
from qarl.policy.policy import Policy
from qarl.rollout.native.engine import NativeEngine
from qarl.types import Prompt


@pytest.fixture(scope="session")
def make_policy(tiny_model) -> Callable[..., Policy]:
    """make_policy(family, scheme, dtype, **quant) -> policy at version 0. Tests share it, so they must not train it."""
    made: dict[tuple, Policy] = {}

    def make(family: str = "llama", scheme: str = "w4a16", dtype: torch.dtype = torch.bfloat16, **quant) -> Policy:
        key = (family, scheme, dtype, *sorted(quant.items()))
        if key not in made:
            quant.setdefault("group_size", 32 if scheme.startswith("w4") else None)
            made[key] = policy_models.make_policy(tiny_model(family), scheme, dtype, **quant)
        return made[key]

    return make


@pytest.fixture
def make_fused(tiny_model, monkeypatch) -> Callable[..., Policy]:
    """make_fused(family, **sizes) -> bf16 policy with one layer that runs Triton kernels, on a GPU or interpreted."""
    if not (INTERPRETED or torch.cuda.is_available()):
        pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def make(family: str, **sizes: int) -> Policy:
        with monkeypatch.context() as patch:
            patch.setattr("qarl.policy.policy.use_kernels", lambda *_: True)
            model = tiny_model(family, num_hidden_layers=1, **sizes)
            return policy_models.make_policy(model, "bf16", torch.bfloat16, device=device)

    return make


@pytest.fixture(scope="session")
def tokenizer(tiny_model):
    return load_tokenizer(ModelConfig(path=str(tiny_model())))


@pytest.fixture
def make_engine(make_policy, tokenizer) -> Callable[..., NativeEngine]:
    """make_engine(policy=None, **rollout) -> an engine with the policy's current snapshot published."""

    def make(policy: Policy | None = None, **rollout) -> NativeEngine:
        policy = policy or make_policy()
        engine = NativeEngine(policy.sampler, tokenizer, RolloutConfig(**rollout))
        engine.publish(policy.current)
        return engine

    return make


@pytest.fixture
def prompts() -> list[Prompt]:
    """Prompts shorter than a page, as long as a page, one token longer than a page, and longer than two pages."""
    generator = torch.Generator().manual_seed(0)
    lengths = [7, 64, 1, 65, 130, 63]
    tokens = [torch.randint(3, 259, (length,), generator=generator).tolist() for length in lengths]
    return [Prompt(10 + i, ids, "", {}) for i, ids in enumerate(tokens)]
