"""Mixtures of experts in the native engine: the learner's log-probs bit for bit, and the recorded experts."""

from dataclasses import replace

import pytest
import torch
from qarl_kernels.logprob import Truncation

from qarl.policy.policy import Policy
from qarl.policy.routes import recording
from qarl.rollout.engine import SamplingParams
from qarl.rollout.native.engine import NativeEngine
from qarl.types import Prompt, Rollout

SAMPLING = SamplingParams(3, 3, 9, record_routing=True)


def prompts_of(*lengths: int) -> list[Prompt]:
    return [Prompt(i, [3 + (31 * i + 7 * j) % 256 for j in range(n)], "", {}) for i, n in enumerate(lengths)]


PROMPTS = prompts_of(63, 5)


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
    rollouts = engine.generate(prompts, sampling, 0)
    logp, experts = learned(policy, prompts, rollouts)
    assert torch.equal(logp, torch.tensor([value for r in rollouts for value in r.logprobs]))
    found = [r.routing for r in rollouts]
    assert all(one.dtype == torch.uint8 and one.device.type == "cpu" for one in found)
    assert torch.equal(torch.cat(found).int(), experts)


@pytest.mark.parametrize(("family", "scheme"), [("mixtral", "w8a8"), ("qwen2_moe", "w4a16")])
def test_plain_layers(make_policy, make_engine, family, scheme) -> None:
    policy = make_policy(family, scheme)
    check(policy, make_engine(policy, max_batched_tokens=7, max_num_seqs=3), PROMPTS, SAMPLING)
    few_pages = make_engine(policy, kv_cache_tokens=192, max_batched_tokens=64)
    check(policy, few_pages, PROMPTS, SAMPLING)
    assert few_pages.preemptions > 0


def test_layers_of_triton_kernels(make_fused, make_engine) -> None:
    """Decodes beside a prefill, and a second step of the same size: on a GPU a graph."""
    policy = make_fused("qwen2_moe", num_attention_heads=2, num_key_value_heads=1, intermediate_size=64)
    check(
        policy,
        make_engine(policy, max_batched_tokens=9),
        prompts_of(9, 2),
        replace(SAMPLING, n=1, max_response_length=4),
    )


def test_routing_is_recorded_only_if_requested_and_changes_no_response(make_policy, make_engine) -> None:
    engine = make_engine(make_policy("qwen3_moe"))
    recorded = engine.generate(PROMPTS, SAMPLING, 0)
    assert all(r.routing is not None for r in recorded)
    again = engine.generate(PROMPTS, replace(SAMPLING, record_routing=False), 0)
    assert again == recorded and all(r.routing is None for r in again)
    assert all(r.routing is None for r in make_engine(make_policy()).generate(PROMPTS, SAMPLING, 0))  # a dense model
