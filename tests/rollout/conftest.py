"""Policies and engines on the tiny models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from qarl_formats.registry import make_scheme

from qarl.config import ModelConfig, QuantConfig, RolloutConfig
from qarl.policy.load import load_model, load_tokenizer
from qarl.policy.policy import Policy
from qarl.rollout.native.engine import NativeEngine
from qarl.types import Prompt


@pytest.fixture(scope="session")
def make_policy(tiny_model) -> Callable[..., Policy]:
    """make_policy(family, scheme, dtype, **quant) -> policy at version 0; made once a session, not to be trained."""
    made: dict[tuple, Policy] = {}

    def make(family: str = "llama", scheme: str = "w4a16", dtype: torch.dtype = torch.bfloat16, **quant) -> Policy:
        key = (family, scheme, dtype, *sorted(quant.items()))
        if key not in made:
            if scheme.startswith("w4"):
                quant.setdefault("group_size", 32)
            config = QuantConfig(scheme=scheme, **quant)
            model = load_model(ModelConfig(path=str(tiny_model(family))))
            made[key] = Policy(
                model, make_scheme(scheme, config.group_size, config.symmetric), config, dtype, torch.device("cpu")
            )
        return made[key]

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
    """Prompts shorter than a page, as long as one, one token longer and over two."""
    generator = torch.Generator().manual_seed(0)
    lengths = [7, 64, 1, 65, 130, 63]
    tokens = [torch.randint(3, 259, (length,), generator=generator).tolist() for length in lengths]
    return [Prompt(10 + i, ids, "", {}) for i, ids in enumerate(tokens)]
