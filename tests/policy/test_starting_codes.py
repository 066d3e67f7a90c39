"""GPTQ and AWQ on whole models: the masters, the codes of version 0, and what they do to the model."""

import random

import pytest
import torch
from policy_models import load, make_policy
from qarl_formats.bits import same_bits
from qarl_formats.gptq import gptq

from qarl.errors import UserError
from qarl.policy.policy import Policy
from qarl.policy.starting_codes import hessian_of, replace_masters, starting_masters

SCHEMES = {
    "w4a16": {"group_size": 32},
    "w4a16 asymmetric": {"group_size": 64, "symmetric": False},
    "w4a8": {"group_size": 32},
    "w8a8": {},
    "nvfp4a16": {},
}


def sequences(seed: int, count: int = 12, length: int = 40) -> list[list[int]]:
    """Tokens of which some are far more frequent than others."""
    chosen = random.Random(seed)
    return [[3 + int(250 * chosen.random() ** 3) for _ in range(length + i)] for i in range(count)]


def masters_of(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}


def policy_of(model, scheme: str) -> Policy:
    return make_policy(load(model), scheme.split()[0], torch.bfloat16, **SCHEMES[scheme])


def divergence(policy: Policy, reference: Policy) -> float:
    """Mean KL of the next token's distribution, on text that was not calibrated with."""
    text = sequences(99)
    p, q = (one.sampler.logits(one.sampler.states(text)).double().log_softmax(-1) for one in (reference, policy))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize(("scheme", "family"), [*zip(SCHEMES, ["llama", "qwen2"] * 3, strict=False)])
def test_gptq_diverges_less_than_rounding_to_nearest(tiny_model, scheme, family):
    reference, policy = (
        make_policy(load(tiny_model(family)), dtype=torch.bfloat16),
        policy_of(tiny_model(family), scheme),
    )
    nearest = divergence(policy, reference)
    replace_masters(policy, "gptq", sequences(0))
    assert divergence(policy, reference) < 0.9 * nearest


@pytest.mark.parametrize(("scheme", "family"), [("w4a16", "llama"), ("nvfp4a16", "qwen2")])
def test_awq_does_not_change_the_unquantized_model(tiny_model, scheme, family):
    policy = policy_of(tiny_model(family), scheme)
    changed = starting_masters(policy, "awq", sequences(0), masters_of(policy).__getitem__)
    assert any(name.endswith("norm.weight") for name in changed)
    model = load(tiny_model(family))
    before = make_policy(model).sampler.states(sequences(1))
    model.load_state_dict(changed, strict=False)
    after = make_policy(model).sampler.states(sequences(1))
    assert torch.allclose(after, before, rtol=2e-4, atol=2e-4 * float(before.abs().max()))


def test_awq_diverges_less_than_rounding_to_nearest(tiny_model):
    """Some channels are ten times as large as the others, as in large models."""
    model = load(tiny_model("llama"))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[::9] *= 10
            layer.post_attention_layernorm.weight[::9] *= 10
    reference, policy = (
        make_policy(model, dtype=torch.bfloat16),
        make_policy(model, "w4a16", torch.bfloat16, group_size=32),
    )
    nearest = divergence(policy, reference)
    replace_masters(policy, "awq", sequences(0))
    assert divergence(policy, reference) < 0.9 * nearest


def test_awq_scales_values_for_the_output_projection_if_every_head_has_its_own(tiny_model):
    for heads, changes in ((4, True), (2, False)):
        policy = policy_of(tiny_model("qwen2", num_key_value_heads=heads), "w4a16")
        before = masters_of(policy)
        changed = starting_masters(policy, "awq", sequences(0), before.__getitem__)
        bias = "model.layers.0.self_attn.v_proj.bias"
        assert (bias in changed and not torch.equal(changed[bias], before[bias])) == changes


@pytest.mark.parametrize("scheme", SCHEMES)
def test_version_0_publishes_the_codes_of_gptq(tiny_model, scheme, monkeypatch):
    made = []

    def recorded(*arguments, **named):
        made.append(gptq(*arguments, **named))
        return made[-1]

    monkeypatch.setattr("qarl.policy.starting_codes.gptq", recorded)
    policy = policy_of(tiny_model("llama"), scheme)
    replace_masters(policy, "gptq", sequences(0))
    linears, found = policy.decoder.linears, iter(made)
    assert policy.version == 0 and policy.sampler.current
    for linear in linears:
        whole = policy.scheme.can_concatenate(linear.widths)
        for names in [linear.names] if whole else [(name,) for name in linear.names]:
            widths = [policy.current.weights[name].shape[0] for name in names]
            parts = policy.scheme.split(next(found)[0], widths)
            for name, stored in zip(names, parts, strict=True):
                held = policy.current.weights[name].tensors
                assert all(same_bits(held[suffix], stored[suffix]) for suffix in stored)
    assert next(found, None) is None


def test_each_linear_sees_the_outputs_of_the_quantized_linears_before_it(tiny_model):
    policy = policy_of(tiny_model("llama"), "w4a16")
    before, seen = masters_of(policy), {}
    replace_masters(policy, "gptq", sequences(0))

    def note(index, operation, *tensors, rows=None):
        if (index, operation) == (1, "activation"):
            seen["input"] = tensors[0]

    with policy.decoder.noting(note):
        policy.sampler.states(sequences(0))
    name = "model.layers.1.mlp.down_proj"
    stored, _ = gptq(before[f"{name}.weight"], hessian_of(seen["input"]), policy.scheme)
    assert torch.equal(policy.current.weights[name].tensors["weight_packed"], stored["weight_packed"])


def test_ignored_layers_keep_their_weights(tiny_model):
    ignore = ["lm_head", "re:.*layers.1.*", "model.layers.0.self_attn.q_proj"]
    policy = make_policy(load(tiny_model("llama")), "w4a16", torch.bfloat16, group_size=32, ignore=ignore)
    changed = starting_masters(policy, "gptq", sequences(0), masters_of(policy).__getitem__)
    assert changed and not any("layers.1." in name or "q_proj" in name for name in changed)


def test_mixtures_of_experts_are_refused(tiny_model):
    policy = make_policy(load(tiny_model("qwen3_moe")), "w4a16", torch.bfloat16, group_size=32)
    with pytest.raises(UserError, match="use rtn for a mixture of experts"):
        replace_masters(policy, "gptq", sequences(0))
