"""The experts that the native engine records: the same however its steps are cut, and whatever comes back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qarl.policy.routes import numbers_of
from qarl.rollout.engine import SamplingParams
from qarl.types import Prompt

SAMPLING = SamplingParams(n=3, seed=3, max_response_length=12, record_routing=True)
LAYOUTS = {
    "seven tokens a step": {"max_batched_tokens": 7, "max_num_seqs": 3},
    "few pages": {"kv_cache_tokens": 192, "max_batched_tokens": 64},
}


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(0)
    lengths = [7, 60, 58]
    tokens = [torch.randint(3, 259, (n,), generator=generator).tolist() for n in lengths]
    return [Prompt(i, ids, "", {}) for i, ids in enumerate(tokens)]


def test_routing_does_not_depend_on_steps_pages_and_preemptions(make_policy, make_engine, prompts) -> None:
    policy = make_policy("qwen3_moe")
    roomy = make_engine(policy).generate(prompts, SAMPLING, 0)
    for found in roomy:
        rows = len(prompts[found.prompt_id].token_ids) + len(found.token_ids) - 1
        assert found.routing.shape == (rows, 1, 2) and found.routing.dtype == torch.uint8  # the first layer has an MLP
        numbers = numbers_of(found.routing)
        assert (numbers[..., 0] < numbers[..., 1]).all() and int(numbers.min()) >= 0 and int(numbers.max()) < 4
    for name, layout in LAYOUTS.items():
        engine = make_engine(policy, **layout)
        again = engine.generate(prompts, SAMPLING, 0)
        assert again == roomy, name
        assert all(torch.equal(a.routing, b.routing) for a, b in zip(again, roomy, strict=True)), name
    assert engine.preemptions > 0  # few pages


def test_nothing_is_recorded_where_nobody_asks_and_of_a_dense_model(make_policy, make_engine, prompts) -> None:
    short = replace(SAMPLING, max_response_length=2)
    engine = make_engine(make_policy("qwen3_moe"))
    recorded = engine.generate(prompts, short, 0)
    assert all(r.routing is not None for r in recorded)
    asked_no_more = engine.generate(prompts, replace(short, record_routing=False), 0)
    assert asked_no_more == recorded and all(r.routing is None for r in asked_no_more)
    assert all(r.routing is None for r in make_engine(make_policy()).generate(prompts, short, 0))


def test_new_weights_free_what_was_recorded(make_policy, make_engine, prompts) -> None:
    engine = make_engine(make_policy("qwen3_moe"))
    expected = engine.generate(prompts, SAMPLING, 0)
    generation = engine.begin(SAMPLING, 0, 72, 9)
    for version in range(3):
        generation.use_version(version)
        assert not generation._record._prompts and not generation._record._responses
        responses = [r for prompt in prompts for r in generation.add(prompt, range(3), 3)]
        while generation.busy:
            generation.step()
        found = [generation.rollout(response, 3) for response in responses]
        assert all(torch.equal(a.routing, b.routing) for a, b in zip(found, expected, strict=True))
