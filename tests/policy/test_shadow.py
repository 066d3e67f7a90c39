"""Shadow, reference, and a learner in its own dtype: the tensors that a forward reads, and the bits of its results."""

import pytest
import torch
from policy_models import (
    CPU,
    assert_gradients_close,
    hf_gradients,
    hf_logprobs,
    load,
    make_policy,
    tokens,
    weights_of_loss,
)
from policy_models import logprobs as logprobs_of
from policy_models import sampled as sampled_of
from qarl_formats.registry import make_scheme
from qarl_kernels.logprob import Truncation

from qarl.config import QuantConfig
from qarl.errors import UserError
from qarl.policy.policy import Policy
from qarl.weight_sync.fingerprints import fingerprints, verify

GROUP = 32
PLAIN = Truncation()
UNALIGNED = ["fake_quant", "full_precision"]


SHORT = tokens(5, 1)
TEXTS = {"prompts": [SHORT, SHORT, tokens(70, 2)], "responses": [tokens(9, 4), tokens(1, 5), tokens(6, 6)]}


def logprobs(policy: Policy, **kwargs) -> torch.Tensor:
    return logprobs_of(policy, **TEXTS, **kwargs)


def sampled(policy: Policy) -> torch.Tensor:
    return sampled_of(policy, **TEXTS)


def _shadow(policy: Policy, truncation: Truncation = PLAIN) -> torch.Tensor:
    return policy.frozen_logprobs(policy.shadow, *TEXTS.values(), truncation, 50)


def _move(policy: Policy) -> None:
    """Masters move as far as a large step would, norms and biases too, and are quantized again."""
    with torch.no_grad():
        for index, (_, master) in enumerate(policy.named_parameters()):
            master.add_(torch.randn(master.shape, generator=torch.Generator().manual_seed(index)) * 0.05)
    policy.refresh(policy.version + 1)


def _own(directory, learner: str, dtype: torch.dtype, learner_dtype: torch.dtype, scheme: str = "w4a16") -> Policy:
    group = GROUP if scheme[:2] == "w4" else None
    quant = QuantConfig(scheme=scheme, group_size=group, learner=learner)
    return Policy(load(directory), make_scheme(scheme, group), quant, dtype, CPU, learner_dtype=learner_dtype)


# --- shadow


@pytest.mark.parametrize("scheme", ["bf16", "w4a16", "w8a8"])
def test_an_aligned_learner_is_its_own_shadow_bit_for_bit(tiny_model, scheme: str) -> None:
    policy = make_policy(tiny_model("qwen2"), scheme, torch.bfloat16, GROUP if scheme[:2] == "w4" else None)
    _move(policy)
    with torch.no_grad():
        assert policy.aligned and torch.equal(_shadow(policy), logprobs(policy, chunk=50))


@pytest.mark.parametrize("learner", UNALIGNED)
def test_the_shadow_is_the_sampler_of_the_current_version(tiny_model, learner: str) -> None:
    policy = make_policy(tiny_model("qwen2"), "w8a8", torch.bfloat16, learner=learner)
    published = sampled(policy)
    assert torch.equal(_shadow(policy), published)
    _move(policy)
    ahead = _shadow(policy)
    assert not torch.equal(ahead, published)
    assert torch.equal(sampled(policy), published), "the shadow moved the sampler"
    policy.sampler.install(policy.current)
    assert torch.equal(sampled(policy), ahead)


@pytest.mark.parametrize("learner", ["aligned", *UNALIGNED])
def test_an_fp8_kv_cache_is_the_learners_but_in_full_precision(tiny_model, learner: str) -> None:
    quant = {"learner": learner, "group_size": GROUP}
    plain = make_policy(tiny_model("qwen2"), "w4a16", torch.bfloat16, **quant)
    rounded = make_policy(tiny_model("qwen2"), "w4a16", torch.bfloat16, **quant, kv_cache_dtype="fp8")
    with torch.no_grad():
        own, other = logprobs(rounded, chunk=50), logprobs(plain, chunk=50)
    assert torch.equal(own, other) == (learner == "full_precision")
    shadow = _shadow(rounded)
    assert not torch.equal(shadow, _shadow(plain)) and (shadow - _shadow(plain)).abs().max() < 0.5
    assert torch.equal(shadow, own) == (learner != "full_precision")  # of w4a16, whose activations are as they are


@pytest.mark.parametrize("shadow", [False, True])
def test_the_top_token_is_the_one_with_the_largest_log_prob(tiny_model, shadow: bool) -> None:
    policy = make_policy(tiny_model("qwen2"), "w4a16", torch.bfloat16, GROUP, learner="full_precision")
    every = range(policy.config.vocab_size)

    weights = policy.shadow if shadow else None
    with torch.no_grad():
        logp, _ = policy.logprobs([SHORT for _ in every], [[token] for token in every], PLAIN, 50, weights=weights)
        best, top = int(logp.argmax()), policy.top_tokens(*TEXTS.values(), 5, weights=weights)
    assert top.shape == (sum(map(len, TEXTS["responses"])),)
    # The first tokens of both responses to SHORT.
    assert top[0] == best == top[len(TEXTS["responses"][0])]


def test_a_shadows_gradient_goes_straight_through_to_the_masters(tiny_model) -> None:
    policy = make_policy(tiny_model("qwen2"), "w4a16", group_size=GROUP, learner="full_precision")
    aligned = make_policy(tiny_model("qwen2"), "w4a16", group_size=GROUP)
    found = []
    for made in (aligned, policy):
        made.model.zero_grad()
        logp = logprobs(made, weights=made.shadow)
        (logp * torch.linspace(-1, 1, len(logp))).sum().backward()
        found.append({name: p.grad.clone() for name, p in made.named_parameters()})
    for name, gradient in found[0].items():
        assert torch.equal(found[1][name], gradient), name
    own = logprobs(policy)
    (own * torch.linspace(-1, 1, len(own))).sum().backward()
    assert not torch.equal(
        policy.linears["model.layers.0.mlp.up_proj"].weight.grad, found[0]["model.layers.0.mlp.up_proj.weight"]
    )


# --- reference


@pytest.mark.parametrize("learner", ["aligned", *UNALIGNED])
def test_the_reference_stays_what_the_learner_was(tiny_model, learner: str) -> None:
    policy = make_policy(tiny_model("qwen2"), "w4a16", torch.bfloat16, GROUP, learner=learner)
    with torch.no_grad():
        start = logprobs(policy)
    policy.keep_reference()
    _move(policy)
    _move(policy)
    policy.sampler.install(policy.current)
    found = policy.frozen_logprobs(policy.reference, *TEXTS.values(), PLAIN, 128)
    assert not found.requires_grad and torch.equal(found, start)
    assert not torch.equal(logprobs(policy).detach(), start)


# --- a learner in its own dtype


def test_a_float32_learner_beside_a_bf16_sampler_is_the_hugging_face_model(tiny_model) -> None:
    policy = _own(tiny_model("qwen2"), "full_precision", torch.bfloat16, torch.float32)
    model = load(tiny_model("qwen2"))
    torch.testing.assert_close(logprobs(policy), hf_logprobs(model, **TEXTS), rtol=0, atol=1e-4)
    logp = logprobs(policy)
    (logp * weights_of_loss(len(logp))).sum().backward()
    found = {name: p.grad for name, p in policy.named_parameters()}
    assert_gradients_close(found, hf_gradients(model, **TEXTS), 1e-3)


@pytest.mark.parametrize(("scheme", "learner_dtype"), [("bf16", torch.float32), ("w4a16", torch.float16)])
def test_the_sampler_keeps_its_bits_beside_a_learner_of_another_dtype(tiny_model, scheme, learner_dtype) -> None:
    policy = _own(tiny_model("qwen2"), "full_precision", torch.bfloat16, learner_dtype, scheme)
    plain = make_policy(tiny_model("qwen2"), scheme, torch.bfloat16, GROUP if scheme[:2] == "w4" else None)
    assert not policy.aligned and policy.current.manifest() == plain.current.manifest()
    assert torch.equal(sampled(policy), sampled(plain))
    assert torch.equal(_shadow(policy), _shadow(plain))
    verify(0, policy.current.fingerprints, fingerprints(policy.sampler.held()))


def test_an_aligned_learner_of_another_dtype_is_refused(tiny_model) -> None:
    with pytest.raises(UserError, match=r"model.learner_dtype: an aligned learner computes in the sampler's"):
        _own(tiny_model("llama"), "aligned", torch.bfloat16, torch.float32)
