"""The layers of Triton kernels against those in plain torch: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from policy_models import assert_gradients_close, make_policy, tokens
from qarl_kernels.launch import INTERPRETED
from qarl_kernels.logprob import Truncation

from qarl.policy.attention import Span
from qarl.policy.policy import Policy

pytestmark = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device, or TRITON_INTERPRET=1"
)
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
PLAIN = Truncation()
PROMPTS = [tokens(3, 1)] * 2 + [tokens(5, 2)]
RESPONSES = [tokens(6, 3), tokens(1, 4), tokens(4, 5)]
ALL = [
    ("bf16", None),
    ("w4a16", 32),
    ("w8a8", None),
    ("fp8", None),
    ("fp8_block", None),
    ("w4a8", 32),
    ("nvfp4a16", None),
]
SCHEMES = ALL if ON_GPU else ALL[1:3]  # the interpreter takes seconds for each
# bf16 rounds every activation; other sums turn some of them over, and codes of activations with them
TOLERANCE = {"bf16": 0.05, "w4a16": 0.05, "nvfp4a16": 0.05, "w8a8": 0.1}


def fused(tiny_model, monkeypatch, scheme: str = "bf16", group: int | None = None, family="qwen3", **quant) -> Policy:
    with monkeypatch.context() as patch:
        patch.setattr("qarl.policy.policy.use_kernels", lambda *_: True)
        policy = policy_of(tiny_model, scheme, group, family, **quant)
    assert policy.learner_view.fused
    return policy


def policy_of(tiny_model, scheme: str, group: int | None, family: str = "qwen3", **quant) -> Policy:
    layers = 2 if ON_GPU else 1
    directory = tiny_model(family, num_hidden_layers=layers)
    return make_policy(directory, scheme, torch.bfloat16, group, DEVICE, **quant)


def plain(tiny_model, scheme: str = "bf16", group: int | None = None, family: str = "qwen3", **quant) -> Policy:
    return policy_of(tiny_model, scheme, group, family, kernels="reference", **quant)


def logprobs(policy: Policy, prompts=PROMPTS, responses=RESPONSES) -> torch.Tensor:
    return policy.logprobs(prompts, responses, PLAIN, 128)[0]


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    policy.model.zero_grad()
    logp = logprobs(policy)
    (logp * torch.linspace(-1, 1, len(logp), device=DEVICE)).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}


@pytest.mark.parametrize(
    ("scheme", "group", "learner"),
    [(*scheme, "aligned") for scheme in ALL[:1] + SCHEMES]
    + [("w4a16", 32, "full_precision"), ("w8a8", None, "fake_quant")],
)
def test_log_probs_and_gradients_agree_with_plain_layers(tiny_model, monkeypatch, scheme, group, learner) -> None:
    policy = fused(tiny_model, monkeypatch, scheme, group, learner=learner)
    reference = plain(tiny_model, scheme, group, learner=learner)
    torch.testing.assert_close(
        logprobs(policy).detach(), logprobs(reference).detach(), rtol=0, atol=TOLERANCE.get(scheme, 0.3)
    )
    found, expected = gradients(policy), gradients(reference)
    for name, gradient in expected.items():
        cosine = torch.nn.functional.cosine_similarity(found[name].flatten(), gradient.flatten(), dim=0)
        least = 0.99 if scheme in TOLERANCE else 0.95
        assert cosine > least, (name, float(cosine))
        assert 0.9 < found[name].norm() / gradient.norm() < 1.1, name


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_every_family_agrees_with_plain_layers(tiny_model, monkeypatch, family) -> None:
    policy = fused(tiny_model, monkeypatch, family=family)
    reference = plain(tiny_model, family=family)
    torch.testing.assert_close(logprobs(policy).detach(), logprobs(reference).detach(), rtol=0, atol=0.05)
    found, expected = gradients(policy), gradients(reference)
    assert_gradients_close(found, expected, 0.05)


@pytest.mark.parametrize("recompute", ["mlp", "products", "layer"])
@pytest.mark.parametrize(("scheme", "group"), [("bf16", None), ("w8a8", None)])
def test_what_is_computed_again_has_the_same_bits(tiny_model, monkeypatch, scheme, group, recompute) -> None:
    policy = fused(tiny_model, monkeypatch, scheme, group)
    kept = gradients(policy)
    policy.set_recompute(recompute)
    again = gradients(policy)
    assert all(torch.equal(again[name], kept[name]) for name in kept)


def test_a_second_backward_adds_to_the_gradients(tiny_model, monkeypatch) -> None:
    policy = fused(tiny_model, monkeypatch)
    once = gradients(policy)
    logp = logprobs(policy)
    (logp * torch.linspace(-1, 1, len(logp), device=DEVICE)).sum().backward()
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * once[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("scheme", "group"), SCHEMES)
def test_a_rows_bits_are_its_own_and_the_samplers(tiny_model, monkeypatch, scheme, group) -> None:
    """Alone, with neighbours and with a shared prompt; whole, in chunks and token by token over a KV cache."""
    policy = fused(tiny_model, monkeypatch, scheme, group)
    policy.sampler.install(policy.current)
    with torch.no_grad():
        whole = logprobs(policy)
        alone = torch.cat([logprobs(policy, [p], [r]) for p, r in zip(PROMPTS, RESPONSES, strict=True)])
    assert torch.equal(alone, whole)
    ids = PROMPTS[0] + RESPONSES[0]
    states = policy.sampler.states([ids])
    config = policy.config
    shape = (2, config.num_key_value_heads, 64, config.head_dim)
    caches = [
        tuple(torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE) for _ in "kv")
        for _ in range(config.num_hidden_layers)
    ]
    found, start = [], 0
    for count in (2, 3, 1, 1, 1, 1):
        attention = policy.sampler.paged([Span(0, count, start, [1])], caches)
        with policy.sampler.running():
            found.append(
                policy.sampler.hidden_states(torch.tensor(ids[start : start + count], device=DEVICE), attention)
            )
        start += count
    assert torch.equal(torch.cat(found), states)


@pytest.mark.parametrize(("scheme", "group"), SCHEMES)
def test_what_is_published_lies_where_the_products_read_it(tiny_model, monkeypatch, scheme, group) -> None:
    policy = fused(tiny_model, monkeypatch, scheme, group)
    policy.sampler.install(policy.current)
    held = dict(policy.sampler.held())
    assert held.keys() == policy.current.tensors.keys()
    for name, tensor in policy.current.tensors.items():
        assert same_bits(held[name], tensor), name
    for name, tensor in plain(tiny_model, scheme, group).current.tensors.items():
        assert same_bits(tensor, policy.current.tensors[name]), name


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(*(t.cpu().contiguous().view(-1).view(torch.uint8) for t in (a, b)))
