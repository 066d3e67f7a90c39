"""Mixtures of experts on Triton kernels against those in plain torch: on a GPU, else in Triton's interpreter."""

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fused_models import (
    BOTH,
    DEVICE,
    NEEDS_TRITON,
    ON_GPU,
    PROMPTS,
    RESPONSES,
    TOLERANCE,
    Pairs,
    assert_near,
    caches_of,
    gradients,
    logprobs,
)
from policy_models import make_policy
from qarl_formats.bits import same_bits
from qarl_formats.rows import adjacent
from qarl_formats.weight import quantize_weight

from qarl.diagnostics.crossings import crossings
from qarl.errors import UserError
from qarl.policy.attention import Span
from qarl.policy.policy import Policy
from qarl.policy.routes import Balance, Routes
from qarl.weight_sync.fingerprints import PublishError, verify_in_process

pytestmark = NEEDS_TRITON
ROWS = 3 + 5 + 0 + 5 + 3
FEW = [("bf16", None), ("w8a8", None), ("w4a16", 32)]
ALL = [*FEW, ("fp8", None), ("fp8_block", None), ("w4a8", 32), ("nvfp4a16", None)]
SCHEMES = ALL if ON_GPU else FEW  # the interpreter takes seconds for each
CODES = {"nvfp4a16": ["weight_packed"], "w4a16": ["weight_packed"], "fp8": ["weight"]}


@pytest.fixture(scope="module")
def make(tiny_model) -> Pairs:
    def directory(family: str) -> Path:
        layers = 2 if ON_GPU or family == "qwen3_moe" else 1  # of that one the first has an MLP
        if not ON_GPU:
            small = {"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
        else:
            small = {"hidden_size": 128, **({"moe_intermediate_size": 128} if family.startswith("qwen") else {})}
        return tiny_model(family, num_hidden_layers=layers, **small)

    return Pairs(directory, "mixtral", lambda scheme: True)


def forward(policy: Policy, replay: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs, and the experts that the routers would choose: (T, L, k)."""
    routes = Routes(replay=replay, own={})
    with torch.no_grad():
        return logprobs(policy, routes=routes), routes.recorded()


@pytest.fixture(scope="module")
def own_gradients() -> Callable[[Policy], tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """`gradients` of a policy that keeps all it can and chooses for itself, once for all tests."""
    return functools.cache(gradients)


EVERY = [
    *((*scheme, "mixtral", {}) for scheme in SCHEMES),
    *(("bf16", None, family, {}) for family in ("qwen2_moe", "qwen3_moe", "olmoe")),
    ("w4a16", 32, "qwen2_moe", {}),
    ("w8a8", None, "qwen2_moe", {}),
    ("w8a8", None, "olmoe", {}),
    ("w8a8", None, "qwen3_moe", {"learner": "fake_quant", "ste_input": "dequantized"}),
]
SOME = [("w4a16", 32, "mixtral", {}), *EVERY[-3:]]


@pytest.mark.parametrize(("scheme", "group", "family", "quant"), EVERY if ON_GPU else SOME)
def test_log_probs_and_gradients_agree_with_plain_layers(make, scheme, group, family, quant) -> None:
    fused, plain = (make(fused, scheme, group, family, **quant) for fused in BOTH)
    _, own = forward(plain)
    ours, theirs = (Routes(replay=own, own={}) for _ in BOTH)  # so that no near tie is decided otherwise
    (logp, found), (reference, expected) = gradients(fused, routes=ours), gradients(plain, routes=theirs)
    torch.testing.assert_close(logp, reference, rtol=0, atol=TOLERANCE.get(scheme, 0.3))
    assert_near(found, expected, 0.99 if scheme in TOLERANCE else 0.95)
    differing = (ours.recorded() != theirs.recorded()).any(-1).float().mean()
    assert differing < 0.2, "the routers choose alike"


@pytest.mark.parametrize("recompute", ["mlp", "products", "layer"] if ON_GPU else ["mlp", "layer"])
def test_what_is_computed_again_has_the_same_bits(make, own_gradients, recompute) -> None:
    policy = make(True, "w8a8", None, "qwen2_moe")  # which quantizes anew what it computes again
    (logp, kept), (same, again) = own_gradients(policy), gradients(policy, recompute)
    assert torch.equal(same, logp) and all(torch.equal(again[name], kept[name]) for name in kept)


def test_the_shared_expert_alone_has_an_fp8_backward(make, own_gradients, monkeypatch) -> None:
    policy = make(True, "w8a8", None, "qwen2_moe")
    logp, exact = own_gradients(policy)
    monkeypatch.setattr(policy.decoder, "backward", "fp8")
    same, found = gradients(policy)
    assert torch.equal(same, logp)
    assert_near(found, exact, 0.98)  # e4m3 errs by 2.6 % of each value
    last = f"model.layers.{len(policy.decoder.layers) - 1}.mlp"
    of_last = [name for name in exact if name.startswith(last)]
    other = {name for name in of_last if not torch.equal(found[name], exact[name])}
    assert other == {f"{last}.shared_expert.{leaf}_proj.weight" for leaf in ("gate", "up", "down")}


def test_one_expert_may_have_every_token_and_routers_have_losses_of_their_own(make) -> None:
    fused, plain = (make(fused) for fused in BOTH)
    name, layers = "model.layers.0.block_sparse_moe", len(fused.decoder.layers)
    replay = torch.tensor([3, 1], device=DEVICE).expand(ROWS, layers, 2)
    (logp, found), (reference, expected) = (
        gradients(policy, routes=Routes(replay=replay, balance=Balance(3.0, 0.5, slice(ROWS - 4), layers)))
        for policy in (fused, plain)
    )
    torch.testing.assert_close(logp, reference, rtol=0, atol=TOLERANCE["bf16"])
    assert_near(found, expected, 0.99)
    assert not found[f"{name}.experts.0.w1.weight"].any() and found[f"{name}.experts.3.w2.weight"].any()
    _, without = gradients(plain, routes=Routes(replay=replay))
    gate = f"{name}.gate.weight"
    assert (without[gate] - expected[gate]).norm() > 0.3 * expected[gate].norm(), "the losses are a large part of it"


def test_replay_of_the_own_choice_changes_no_bit_and_of_another_does(make, monkeypatch) -> None:
    policy = make(True)
    plain, own = forward(policy)
    assert own.shape == (ROWS, len(policy.decoder.layers), 2)
    assert torch.equal(forward(policy, own.flip(-1))[0], plain)
    logp, again = forward(policy, (own + 1) % 4)
    assert not torch.equal(logp, plain)
    assert torch.equal(again[:, 0], own[:, 0])  # what it would have chosen itself: before it nothing is other
    skipped = ((own + 1) % 4).index_fill(2, torch.tensor([0], device=DEVICE), -1)
    monkeypatch.setattr("qarl.policy.policy.FEW_ROWS", 0)
    monkeypatch.setattr("qarl.policy.policy.ROWS", 20)
    logp, again = forward(policy, skipped)  # and rows that fill a batch up are no one's
    assert torch.equal(logp, plain) and torch.equal(again, own)


@pytest.mark.parametrize(("scheme", "group"), SCHEMES if ON_GPU else [("w8a8", None)])
def test_a_rows_bits_are_its_own_and_the_samplers(make, scheme, group) -> None:
    """Alone and with neighbours; whole, in a chunk and as a token over a KV cache."""
    policy = make(True, scheme, group, "qwen2_moe")
    policy.sampler.install(policy.current)
    with torch.no_grad():
        whole, alone = logprobs(policy), logprobs(policy, PROMPTS[2:], RESPONSES[2:])
    assert torch.equal(alone, whole[-len(alone) :])
    ids = PROMPTS[2] + RESPONSES[2][:1]
    states = policy.sampler.states([ids])
    caches = caches_of(policy)
    for start, stop in ((0, len(ids) - 1), (len(ids) - 1, len(ids))):
        attention = policy.sampler.paged([Span(0, stop - start, start, [1])], caches)
        found = policy.sampler.hidden_states(torch.tensor(ids[start:stop], device=DEVICE), attention)
        assert torch.equal(found, states[start:stop])


@pytest.mark.parametrize(("scheme", "group"), SCHEMES if ON_GPU else [("w8a8", None)])
def test_what_is_published_lies_where_the_products_read_it(make, scheme, group) -> None:
    policy, plain = (make(fused, scheme, group, "qwen2_moe") for fused in BOTH)
    policy.sampler.install(policy.current)
    held = dict(policy.sampler.held())
    assert held.keys() == policy.current.tensors.keys() == plain.current.tensors.keys()
    for name, tensor in policy.current.tensors.items():
        assert same_bits(held[name], tensor) and same_bits(plain.current.tensors[name], tensor), name


@pytest.mark.parametrize(
    ("scheme", "group", "quant"),
    [("nvfp4a16", None, {}), ("w4a16", 32, {"symmetric": False}), ("fp8", None, {})],
    ids=["global scale", "zero points", "row scales"],
)
def test_the_experts_of_a_layer_lie_under_one_another_and_keep_their_values(tiny_model, scheme, group, quant) -> None:
    policy = make_policy(tiny_model("mixtral"), scheme, torch.bfloat16, group, **quant)
    for stack in policy.decoder.linears:
        whole, parts = policy.current.groups.get(stack.names), [policy.current.weights[name] for name in stack.names]
        assert (whole is None) == (len(parts) == 1)
        for suffix in CODES[scheme]:
            codes = [part.tensors[suffix] for part in parts]
            assert adjacent(codes) and (whole is None or whole.tensors[suffix].data_ptr() == codes[0].data_ptr())
        for part, master in zip(parts, stack.masters, strict=True):
            alone = quantize_weight(master.detach(), part.scheme, "w", shared=part.tensors.get("weight_global_scale"))
            assert all(same_bits(tensor, alone.tensors[suffix]) for suffix, tensor in part.tensors.items())


@pytest.mark.parametrize(("scheme", "group"), [("bf16", None), ("w4a16", 32), ("fp8", None)])
def test_crossings_of_stacks_are_those_of_each_of_their_weights(tiny_model, scheme, group) -> None:
    policy = make_policy(tiny_model("mixtral"), scheme, torch.bfloat16, group)
    versions = []
    for version in range(2):
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter += 0.01 * version * torch.randn(parameter.shape)
        policy.refresh(version)
        versions.append(policy.current)
    assert sum(len(names) for names in policy.current.groups) > 12
    apart = crossings(*(replace(snapshot, groups={}) for snapshot in versions))
    assert crossings(*versions) == apart and all(0 < changed < total for changed, total in apart.values())
    assert crossings(replace(versions[0], groups={}), versions[1]) == apart


def test_a_byte_that_the_sampler_holds_otherwise_is_found(make) -> None:
    policy = make(True, "w8a8", None, "qwen2_moe")
    policy.sampler.install(policy.current)
    verify_in_process(0, policy.current.tensors, policy.sampler.held())
    (name,) = (name for name in policy.current.tensors if name.endswith("layers.0.mlp.experts.1.down_proj.weight"))
    other = policy.current.tensors[name].clone()
    other[-1, -1] ^= 1
    with pytest.raises(PublishError, match=f"'{re.escape(name)}' differs in the sampler \\(bytes\\)"):
        verify_in_process(0, policy.current.tensors | {name: other}, policy.sampler.held())
    with pytest.raises(PublishError, match="partial: 1 of "):
        verify_in_process(0, policy.current.tensors | {"more": other}, policy.sampler.held())


def test_experts_that_are_no_one_weight_are_refused(make) -> None:
    ignored = ["lm_head", "model.layers.0.block_sparse_moe.experts.2.w1"]
    with pytest.raises(UserError, match=r"quant.scheme: w8a8 cannot hold the experts .*quant.kernels: reference"):
        make(True, "w8a8", ignore=ignored)
