"""Digests of a forward's operations, by sequence and position, and the first difference of two forwards."""

import pytest
import torch
from policy_models import batch, make_policy
from qarl_kernels.launch import INTERPRETED
from qarl_kernels.logprob import Truncation

from qarl.exactness.first_difference import OPERATIONS, FirstDifference, first_difference
from qarl.policy.attention import pack
from qarl.policy.pages import Span
from qarl.policy.trace import Context, Tracer, digest

MIXTURE = [name for name in OPERATIONS if name not in ("embedding", "final_stream", "final_norm", "head")]
LAYER = [name for name in MIXTURE if name != "router" and not name.startswith("shared")]


def test_a_digest_tells_any_one_value_apart_and_knows_no_sign_of_zero():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.float8_e4m3fn):
        x = torch.randn(50, 33).mul(20).to(dtype)
        again, other = x.clone(), x.clone().view(torch.uint8)
        place = torch.arange(50) * x.element_size()
        other[torch.arange(50), place % other.shape[1]] ^= 1
        assert torch.equal(digest([x]), digest([again]))
        assert (digest([x]) != digest([other.view(dtype)])).all(), dtype
    assert torch.equal(digest([torch.zeros(2, 3)]), digest([-torch.zeros(2, 3)]))


def test_a_digest_is_of_all_tensors_in_their_order_and_of_a_row_alone():
    a, b = torch.randn(9, 4, 2), torch.randn(9, 8)
    assert (digest([a, b]) != digest([b, a])).all() and (digest([a]) != digest([a, b])).all()
    assert torch.equal(digest([a[3:5], b[3:5]]), digest([a, b])[3:5])
    assert torch.equal(digest([a[::2]]), digest([a])[::2])  # contiguous or not


def test_two_traces_part_at_the_earliest_position_and_there_at_the_first_operation():
    one = {(-1, "embedding"): {0: {1}, 1: {2}}, (0, "qkv"): {0: {3}, 1: {4}}, (1, "o"): {0: {5}, 1: {6}, 2: {7}}}
    assert first_difference(one, one) is None and first_difference(one, {}) is None

    def other(**changes: dict[int, set[int]]) -> dict:
        return {step: places | changes.get(step[1], {}) for step, places in one.items()}

    assert first_difference(one, other(embedding={1: {9}}, o={0: {9}})) == FirstDifference(0, 1, "o")
    assert first_difference(one, other(qkv={1: {9}}, o={1: {9}})) == FirstDifference(1, 0, "qkv")
    assert first_difference(one, other(embedding={1: {9}})) == FirstDifference(1, None, "embedding")
    assert first_difference(one, other(qkv={0: {3, 9}})) == FirstDifference(0, 0, "qkv")  # twice, and not the same
    assert first_difference(one, other(o={3: {9}})) is None  # only one has it
    assert str(FirstDifference(4, 1, "o")) == "layer 1, o (the product of o), at position 4"


def test_the_rows_of_a_packed_batch_are_named():
    prompts, responses = batch()
    packing = pack(prompts, responses)
    contexts = packing.contexts(prompts, responses)
    covered = {}
    for context in contexts:
        for position in range(context.position, len(context.tokens)):
            row = context.row + position - context.position
            assert row not in covered and packing.ids[row] == context.tokens[position]
            covered[row] = context.tokens[: position + 1]
    assert sorted(covered) == list(range(len(packing.ids)))
    predicted = [
        prompt + response[:t] for prompt, response in zip(prompts, responses, strict=True) for t in range(len(response))
    ]
    assert [covered[row] for row in packing.rows] == predicted


def traced(policy, run, contexts, tokens) -> Tracer:
    tracer = Tracer(tokens)
    tracer.expect(contexts)
    with policy.decoder.noting(tracer), torch.no_grad():
        run()
    tracer.settle()
    return tracer


@pytest.mark.parametrize(
    ("family", "fused", "cache"), [("qwen2_moe", False, "fp8"), ("qwen2_moe", True, "auto"), ("llama", True, "fp8")]
)
def test_every_operation_of_a_layer_is_told_with_the_same_digests_over_a_cache(
    tiny_model, monkeypatch, family, fused, cache
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if fused and not (INTERPRETED or device.type == "cuda"):
        pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1")
    monkeypatch.setattr("qarl.policy.policy.use_kernels", lambda *_: fused)
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
    if cache == "fp8" and fused:
        small["head_dim"] = 64  # whose features a cache of FP8 has in pairs
    model = tiny_model(family, **small)
    policy = make_policy(model, "bf16", torch.bfloat16, None, device, kv_cache_dtype=cache)
    operations = LAYER if family == "llama" else MIXTURE
    policy.sampler.install(policy.current)
    prompt, response = [7, 11, 13], [17, 19]
    contexts = pack([prompt], [response]).contexts([prompt], [response])
    tokens = prompt + response[:-1]
    learner = traced(policy, lambda: policy.logprobs([prompt], [response], Truncation(), 128), contexts, tokens)
    ends = [(1, "final_stream"), (1, "final_norm")]
    assert list(learner.found) == [(-1, "embedding"), *((0, name) for name in operations), *ends]
    assert all(set(places) == set(range(4)) for step, places in learner.found.items() if step[0] == 0)

    config = policy.config
    shape = (1, config.num_key_value_heads, 64, policy.decoder.layers[0].head_dim)
    zeros = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    caches = [tuple(zeros.to(policy.sampler.cache_dtype, copy=True) for _ in "kv")]
    tracer = Tracer(tokens)
    with policy.sampler.traced(tracer):
        for start, stop in ((0, 3), (3, 4)):
            tracer.expect([Context(0, start, tokens[:stop])])
            attention = policy.sampler.paged([Span(0, stop - start, start, [0])], caches)
            policy.sampler.hidden_states(torch.tensor(tokens[start:stop], device=device), attention)
    tracer.settle()
    assert policy.sampler.tracer is None and first_difference(learner.found, tracer.found) is None
    assert tracer.found.keys() == learner.found.keys()
    assert all(places == tracer.found[step] for step, places in learner.found.items() if step[0] == 0)
    keys = caches[0][0].float()
    keys[:, :, 1] += 1.0
    caches[0][0].copy_(keys)
    with policy.sampler.traced(damaged := Tracer(tokens)):
        damaged.expect([Context(0, 3, tokens)])
        attention = policy.sampler.paged([Span(0, 1, 3, [0])], caches)
        policy.sampler.hidden_states(torch.tensor(tokens[3:], device=device), attention)
    damaged.settle()
    assert first_difference(learner.found, damaged.found) == FirstDifference(3, 0, "attention")
