"""Snapshots made from the masters, what stays unquantized, the three learners, and what is refused."""

import pytest
import torch
from policy_models import CPU, hf_logprobs, load, logprobs, make_policy, parts_of, put_dequantized, sampled
from qarl_formats.registry import make_scheme, scheme_names
from qarl_formats.schemes.bf16 import OrdinaryProduct
from transformers import AutoModelForCausalLM, GPT2Config

from qarl.config import QuantConfig
from qarl.errors import UserError
from qarl.policy.policy import Policy
from qarl.weight_sync.fingerprints import PublishError

QUANTIZED = list(scheme_names())[1:]


def _group(scheme: str) -> int | None:
    return 32 if scheme[:2] == "w4" else None


# --- what a snapshot holds


@pytest.mark.parametrize(
    ("family", "scheme", "symmetric"),
    [*(("qwen2", scheme, True) for scheme in QUANTIZED), ("qwen2", "w4a16", False), ("qwen3", "w8a8", True)],
)
def test_snapshot_has_the_names_dtypes_and_shapes_of_compressed_tensors(tiny_model, family, scheme, symmetric) -> None:
    """Everything but the projections is unquantized: embedding, output layer, norms, biases."""
    policy = make_policy(tiny_model(family), scheme, torch.bfloat16, _group(scheme), symmetric=symmetric)
    expected = {}
    for name, parameter in load(tiny_model(family)).named_parameters():
        module = name.removesuffix(".weight")
        if name.endswith("proj.weight"):
            for suffix, spec in policy.scheme.tensor_specs(*parameter.shape).items():
                expected[f"{module}.{suffix}"] = getattr(torch, spec.dtype), spec.shape
        else:
            expected[name] = (torch.bfloat16, tuple(parameter.shape))
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in policy.current.tensors.items()}
    assert found == expected and policy.tied == ("lm_head.weight" not in found)


@pytest.mark.parametrize(
    ("scheme", "dtype"), [*zip(["bf16", *QUANTIZED], [torch.float32, torch.bfloat16] * 4, strict=False)]
)
def test_refresh_makes_new_tensors_and_leaves_the_old_snapshot(tiny_model, scheme: str, dtype: torch.dtype) -> None:
    policy = make_policy(tiny_model("llama"), scheme, dtype, _group(scheme))
    old = policy.current
    manifest, generator = old.manifest(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, master in policy.named_parameters():  # not all alike: scales relative to a tensor's own would stay
            master.mul_(-0.5 - 0.5 * torch.rand(master.shape, generator=generator))
    assert old.manifest() == manifest, "a master's change reached the snapshot"
    new = policy.refresh(7)
    assert policy.version == new.version == 7 and policy.current is new
    assert old.manifest() == manifest
    shapes = {name for name in new.tensors if name.endswith("weight_shape")}
    assert all(not torch.equal(new.tensors[n], old.tensors[n]) for n in new.tensors.keys() - shapes)
    assert new.tensors.keys() == old.tensors.keys()


@pytest.mark.parametrize("learner", ["aligned", "full_precision"])
def test_refresh_moves_the_learner_and_a_publish_of_the_current_snapshot_the_sampler(tiny_model, learner) -> None:
    policy = make_policy(tiny_model("llama"), "w4a16", group_size=32, learner=learner)
    before, published, old = logprobs(policy).detach(), sampled(policy), policy.current
    with torch.no_grad():
        policy.linears["model.layers.0.mlp.up_proj"].weight.mul_(-0.5)
    assert torch.equal(logprobs(policy).detach(), before), "a master's change is not seen before a refresh"
    policy.refresh(1)
    assert not torch.equal(logprobs(policy).detach(), before)
    assert torch.equal(sampled(policy), published)
    with pytest.raises(PublishError, match="version 0: the learner is at version 1"):
        policy.sampler.install(old)
    policy.sampler.install(policy.current)
    assert not torch.equal(sampled(policy), published)


# --- what stays unquantized


def test_ignore_list_takes_exact_names_and_regular_expressions(tiny_model) -> None:
    exact, pattern = "model.layers.0.mlp.down_proj", "re:.*layers.1.self_attn.*"
    policy = make_policy(tiny_model("llama"), "w4a16", group_size=32, ignore=["lm_head", exact, pattern])
    everything = {f"model.layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in "qkvo"}
    everything |= {f"model.layers.{i}.mlp.{p}_proj" for i in (0, 1) for p in ("gate", "up", "down")}
    expected = {name for name in everything if name != exact and "layers.1.self_attn" not in name}
    assert set(policy.current.weights) == expected
    assert policy.current.tensors[f"{exact}.weight"].dtype == torch.float32


def test_ignored_layers_run_and_learn_unquantized(tiny_model) -> None:
    policy = make_policy(tiny_model("llama"), "w4a16", group_size=32, ignore=["lm_head", "re:.*layers.1.*"])
    model = put_dequantized(load(tiny_model("llama")), policy)
    torch.testing.assert_close(logprobs(policy), hf_logprobs(model), rtol=0, atol=1e-4)


# --- the three learners


def test_full_precision_learner_is_the_unquantized_model_beside_a_quantized_sampler(tiny_model) -> None:
    policy = make_policy(tiny_model("qwen2"), "w8a8", learner="full_precision")
    aligned = make_policy(tiny_model("qwen2"), "w8a8")
    assert aligned.aligned and aligned.weights is aligned.sampler.weights and not policy.aligned
    with torch.no_grad():
        learner = logprobs(policy)
        torch.testing.assert_close(learner, hf_logprobs(load(tiny_model("qwen2"))), rtol=0, atol=1e-4)
        assert torch.equal(sampled(policy), logprobs(aligned))
        assert not torch.allclose(sampled(policy), learner, atol=1e-3)


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
def test_fake_quant_learner_is_near_the_sampler_but_not_on_its_arithmetic(tiny_model, scheme: str) -> None:
    policy = make_policy(tiny_model("llama"), scheme, group_size=_group(scheme), learner="fake_quant")
    assert all(
        isinstance(weight.scheme, OrdinaryProduct) for weight in (part.weight for part in parts_of(policy.weights))
    )
    with torch.no_grad():
        learner = logprobs(policy)
        # float32 all through: the same numbers up to rounding, and codes that a rounding moves to a neighbour
        torch.testing.assert_close(learner, sampled(policy), rtol=0, atol=0.05)


# --- what is refused


def test_group_size_that_does_not_divide_names_the_layer_unless_it_is_ignored(tiny_model) -> None:
    message = r"quant.group_size: model.layers.0.self_attn.q_proj: group_size 128 does not divide its 64 input features"
    with pytest.raises(UserError, match=message):
        make_policy(tiny_model("llama"), "w4a16", group_size=128)
    policy = make_policy(tiny_model("llama"), "w4a16", group_size=128, ignore=["lm_head", "re:(?!.*down_proj)"])
    assert set(policy.current.weights) == {f"model.layers.{i}.mlp.down_proj" for i in (0, 1)}


def test_a_master_too_large_for_float16_is_named(tiny_model) -> None:
    policy = make_policy(tiny_model("llama"), "w8a8", torch.float16)
    with torch.no_grad():
        dict(policy.named_parameters())["model.norm.weight"][0] = 1e5
    with pytest.raises(UserError, match=r"model.norm.weight: 1 of 64 values are NaN or infinite in torch.float16"):
        policy.refresh(1)


def test_context_above_the_models_is_refused(tiny_model) -> None:
    with pytest.raises(UserError, match=r"model.max_length: 513 is above the model's 512 positions"):
        Policy(load(tiny_model("llama")), make_scheme("bf16"), QuantConfig(scheme="bf16"), torch.float32, CPU, 513)


def test_other_families_are_refused() -> None:
    model = AutoModelForCausalLM.from_config(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=11))
    with pytest.raises(UserError, match=r"model.path: model type 'gpt2' is not supported; use one of llama"):
        Policy(model, make_scheme("bf16"), QuantConfig(scheme="bf16"), torch.float32, CPU)
