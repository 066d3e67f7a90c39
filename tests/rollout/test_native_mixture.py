"""Mixtures of experts in the native engine: the learner's log-probs to the bit, and the experts of every token."""

from __future__ import annotations

import pytest
import torch
from qarl_formats.registry import make_scheme
from qarl_kernels.launch import INTERPRETED
from qarl_kernels.logprob import Truncation

from qarl.config import ModelConfig, QuantConfig, RolloutConfig
from qarl.policy.load import load_model
from qarl.policy.policy import Policy
from qarl.policy.routes import recording
from qarl.rollout.engine import SamplingParams
from qarl.rollout.native.engine import NativeEngine
from qarl.types import Prompt, Rollout

ON_GPU = torch.cuda.is_available()


def tokens(count: int, seed: int) -> list[int]:
    return [3 + (31 * seed + 7 * i) % 256 for i in range(count)]


PROMPTS = [Prompt(i, tokens(length, i), "", {}) for i, length in enumerate([63, 5])]


SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}


def make(tiny_model, family: str, scheme: str, fused: bool, **sizes: int) -> Policy:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qarl.policy.policy.use_kernels", lambda *_: fused)
        model = load_model(ModelConfig(path=str(tiny_model(family, **sizes))))
        quant = QuantConfig(scheme=scheme, group_size=32 if scheme == "w4a16" else None)
        made = make_scheme(scheme, quant.group_size)
        return Policy(model, made, quant, torch.bfloat16, torch.device("cuda" if ON_GPU else "cpu"))


def learned(policy: Policy, prompts: list[Prompt], rollouts: list[Rollout]) -> tuple[torch.Tensor, torch.Tensor]:
    """The learner's log-probs, and the experts of each response's tokens and its prompt's, one after the other."""
    logps, experts = [], []
    for rollout in rollouts:
        routes = recording()
        with torch.no_grad():
            prompt, response = prompts[rollout.prompt_id].token_ids, rollout.token_ids
            logps.append(policy.logprobs([prompt], [response], Truncation(), 128, routes=routes)[0])
        experts.append(routes.recorded())
    return torch.cat(logps).cpu(), torch.cat(experts).cpu()


def check(policy: Policy, engine: NativeEngine, prompts: list[Prompt], sampling: SamplingParams) -> None:
    engine.publish(policy.current)
    rollouts = engine.generate(prompts, sampling, 0)
    logp, experts = learned(policy, prompts, rollouts)
    assert torch.equal(logp, torch.tensor([value for r in rollouts for value in r.logprobs]))
    found = [r.routing for r in rollouts]
    assert all(one.dtype == torch.uint8 and one.device.type == "cpu" for one in found)
    assert torch.equal(torch.cat(found).int(), experts)


LAYOUTS = [{"max_batched_tokens": 7, "max_num_seqs": 3}, {"kv_cache_tokens": 192, "max_batched_tokens": 64}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["chunks", "few pages"])
@pytest.mark.parametrize(
    ("family", "scheme"), [("mixtral", "w8a8"), ("qwen2_moe", "w8a8"), ("qwen3_moe", "w4a16"), ("olmoe", "bf16")]
)
def test_plain_layers(tiny_model, tokenizer, family, scheme, layout) -> None:
    policy = make(tiny_model, family, scheme, False)
    engine = NativeEngine(policy.sampler, tokenizer, RolloutConfig(**layout))
    check(policy, engine, PROMPTS, SamplingParams(3, 3, 9, record_routing=True))
    assert ("kv_cache_tokens" in layout) == (engine.preemptions > 0)


@pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="needs a CUDA device, or TRITON_INTERPRET=1")
def test_layers_of_triton_kernels(tiny_model, tokenizer) -> None:
    """Decodes beside a prefill, and a step of one size done again: on a GPU a graph."""
    policy = make(tiny_model, "qwen2_moe", "bf16", True, **SMALL)
    engine = NativeEngine(policy.sampler, tokenizer, RolloutConfig(max_batched_tokens=9))
    prompts = [Prompt(i, tokens(length, i), "", {}) for i, length in enumerate([9, 2])]
    check(policy, engine, prompts, SamplingParams(1, 3, 4, record_routing=True))


def test_routing_is_recorded_where_it_is_asked_for_alone(tiny_model, tokenizer) -> None:
    policy = make(tiny_model, "mixtral", "bf16", False)
    engine = NativeEngine(policy.sampler, tokenizer, RolloutConfig())
    engine.publish(policy.current)
    assert all(r.routing is None for r in engine.generate(PROMPTS, SamplingParams(1, 3, 2), 0))
